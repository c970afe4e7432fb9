# SPDX-License-Identifier: Apache-2.0
"""`byteback bench inference`: times a forward pass in eval mode without gradients, int8 against PyTorch FP32.

float32 runs in its faster memory format. All sides take turns of some passes in one process, with malloc tuned. The int8
networks are trained for some steps first, because eval mode uses the clips of training. One is then frozen, as it would be for
deployment. The other quantizes its weights in every pass, as between two epochs of training.
"""

from __future__ import annotations

import json
import statistics as stats
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track

import byteback
from byteback import tables
from byteback.bench.step import DEFAULTS
from byteback.bench.training_step import Setting, Side, Variant
from byteback.inspect.memory import tune_malloc

_TURN = 30.0  # milliseconds that one side runs before the next one
_TRAINED = 2  # training steps before the first measurement


@dataclass(frozen=True)
class InferenceConfig:
    """Time the forward pass in eval mode against PyTorch FP32."""

    models: tuple[str, ...] = ("resnet18", "resnet50", "mobilenet_v2")
    """Names of the networks."""
    batches: tuple[int, ...] = (1, 32)
    """Batch sizes."""
    image_size: int | None = None
    """Pixels of a side. The default depends on the network."""
    recipe: str = "unified-int8"
    """Name of the recipe."""
    seconds: float = 3.0
    """Seconds per network and batch size."""
    json: Path | None = None
    """Write the results to this file."""


def run(config: InferenceConfig, console: Console) -> None:
    """Runs the command."""
    tune_malloc()
    jobs = [(name, batch) for name in config.models for batch in config.batches]
    rows, results = [], []
    for name, batch in track(jobs, description="inference", console=console, transient=True):
        size = config.image_size or DEFAULTS.get(name, (224, 16))[0]
        times = measure(Setting(name, size, batch, config.recipe), config.seconds)
        figures = [f"{times.fp32_ms:.2f}", f"{times.frozen_ms:.2f}", f"{times.frozen:.2f}x"]
        rows.append([name, str(size), str(batch), *figures, f"{times.unfrozen_ms:.2f}", f"{times.unfrozen:.2f}x"])
        results.append({"model": name, "image_size": size, "batch": batch, **times._asdict()})
    columns = ["network", "image", "batch", "fp32 ms", "frozen ms", "is faster", "unfrozen ms", "is faster"]
    console.print(tables.build("A forward pass in eval, malloc tuned", columns, rows))
    if config.json:
        config.json.write_text(json.dumps(results, indent=2) + "\n")


class Times(NamedTuple):
    """Milliseconds of a forward pass, and how many times as fast as float32 the int8 networks are."""

    fp32_ms: float
    frozen_ms: float
    unfrozen_ms: float
    frozen: float
    unfrozen: float


def measure(setting: Setting, seconds: float) -> Times:
    """Times float32 and int8, in turns."""
    floats = [_evaluated(setting, Variant("fp32", last)) for last in (False, True)]
    frozen, unfrozen = (_evaluated(setting, Variant("int8", True)) for _ in range(2))
    byteback.freeze(frozen.model)
    sides = (*floats, frozen, unfrozen)
    images = {id(side): side.images[: setting.batch].contiguous(memory_format=side.layout) for side in sides}

    def milliseconds(side: Side) -> float:
        start = time.perf_counter()
        with torch.no_grad():
            side.model(images[id(side)])
        return 1e3 * (time.perf_counter() - start)

    warm = [min(milliseconds(side) for _ in range(4)) for side in sides]
    float32 = floats[0] if warm[0] < warm[1] else floats[1]
    rounds: list[list[float]] = []
    until = time.perf_counter() + seconds
    while len(rounds) < 5 or time.perf_counter() < until:
        rounds.append([_turn(partial(milliseconds, side)) for side in (float32, frozen, unfrozen)])
    medians = [stats.median(column) for column in zip(*rounds, strict=True)]
    ratios = [stats.median(times[0] / times[side] for times in rounds) for side in (1, 2)]
    return Times(*medians, *ratios)


def _turn(milliseconds: Callable[[], float]) -> float:
    """Returns the median of some passes in a row. The first one has no data of this side in the caches and does not count."""
    milliseconds()
    times = [milliseconds()]
    while sum(times) < _TURN:
        times.append(milliseconds())
    return stats.median(times)


def _evaluated(setting: Setting, variant: Variant) -> Side:
    side = Side(replace(setting, batch=max(setting.batch, 4)), variant)
    for _ in range(_TRAINED):
        side.step()
    side.model.eval()
    return side
