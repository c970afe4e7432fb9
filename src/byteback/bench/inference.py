# SPDX-License-Identifier: Apache-2.0
"""`byteback bench inference`: times a forward pass in eval mode without gradients, int8 against PyTorch FP32.

float32 runs in its faster memory format. Both sides alternate in one process, with malloc tuned. The int8 network is trained
for some steps first, because eval mode uses the clips of training, and then frozen, as it would be for deployment.
"""

from __future__ import annotations

import json
import statistics as stats
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

import byteback
from byteback import tables
from byteback.bench.step import DEFAULTS
from byteback.bench.training_step import Setting, Side, Variant
from byteback.inspect.memory import tune_malloc

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
        fp32, int8, ratio = measure(Setting(name, size, batch, config.recipe), config.seconds)
        rows.append([name, str(size), str(batch), f"{fp32:.2f}", f"{int8:.2f}", f"{ratio:.2f}x"])
        results.append({"model": name, "image_size": size, "batch": batch, "fp32_ms": fp32, "int8_ms": int8, "ratio": ratio})
    columns = ["network", "image", "batch", "fp32 ms", "int8 ms", "int8 is faster"]
    console.print(tables.build("A forward pass in eval, malloc tuned", columns, rows))
    if config.json:
        config.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(setting: Setting, seconds: float) -> tuple[float, float, float]:
    """Returns the milliseconds of float32 and int8, and the median ratio."""
    floats = [_evaluated(setting, Variant("fp32", last)) for last in (False, True)]
    int8 = _evaluated(setting, Variant("int8", True))
    images = {id(side): side.images[: setting.batch].contiguous(memory_format=side.layout) for side in (*floats, int8)}

    def milliseconds(side: Side) -> float:
        start = time.perf_counter()
        with torch.no_grad():
            side.model(images[id(side)])
        return 1e3 * (time.perf_counter() - start)

    warm = [min(milliseconds(side) for _ in range(4)) for side in (*floats, int8)]
    float32 = floats[0] if warm[0] < warm[1] else floats[1]
    pairs: list[tuple[float, float]] = []
    until = time.perf_counter() + seconds
    while len(pairs) < 5 or time.perf_counter() < until:
        pairs.append((milliseconds(float32), milliseconds(int8)))
    fp32_ms, int8_ms = (stats.median(pair[i] for pair in pairs) for i in (0, 1))
    return fp32_ms, int8_ms, stats.median(a / b for a, b in pairs)


def _evaluated(setting: Setting, variant: Variant) -> Side:
    side = Side(replace(setting, batch=max(setting.batch, 4)), variant)
    for _ in range(_TRAINED):
        side.step()
    side.model.eval()
    if variant.numbers == "int8":
        byteback.freeze(side.model)
    return side
