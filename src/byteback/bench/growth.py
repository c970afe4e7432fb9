# SPDX-License-Identifier: Apache-2.0
"""`byteback bench growth`: the speed-up of a training step for several batch sizes and image sizes.

Every cell is the median ratio of float32 (in its faster memory format) to int8. Both alternate in one process, with malloc
tuned.
"""

from __future__ import annotations

import json
import statistics as stats
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from byteback import tables
from byteback.bench.training_step import Setting, Side, Variant
from byteback.inspect.memory import tune_malloc


@dataclass(frozen=True)
class GrowthConfig:
    """Time a training step against PyTorch FP32 for several batch sizes and image sizes."""

    model: str = "resnet18"
    """Name of the network, as in `byteback bench step`."""
    recipe: str = "unified-int8"
    """Name of the recipe."""
    batches: tuple[int, ...] = (1, 4, 16, 64, 256)
    """Batch sizes."""
    images: tuple[int, ...] = (32, 64, 128, 224)
    """Image sizes in pixels."""
    seconds: float = 4.0
    """Seconds per cell."""
    most_pixels: int = 64 * 224 * 224
    """Skip cells with more pixels per batch, because float32 would not fit into memory."""
    json: Path | None = None
    """Write the results to this file."""


def run(config: GrowthConfig, console: Console) -> None:
    """Runs the command."""
    tune_malloc()
    pairs = [(b, i) for b in config.batches for i in config.images if b * i * i <= config.most_pixels]
    ratios: dict[tuple[int, int], float] = {}
    for batch, image in track(pairs, description="batch x image", console=console, transient=True):
        ratios[batch, image] = step_ratio(Setting(config.model, image, batch, config.recipe), config.seconds)
    rows = [
        [str(batch), *(f"{ratios[batch, i]:.2f}x" if (batch, i) in ratios else "-" for i in config.images)]
        for batch in config.batches
    ]
    title = f"{config.model}, {config.recipe}: a training step against PyTorch FP32, malloc tuned"
    console.print(tables.build(title, ["batch", *(f"{image} pixels" for image in config.images)], rows))
    if config.json:
        cells = [{"batch": batch, "image_size": image, "ratio": ratio} for (batch, image), ratio in ratios.items()]
        config.json.write_text(json.dumps({"model": config.model, "recipe": config.recipe, "cells": cells}, indent=2) + "\n")


def step_ratio(setting: Setting, seconds: float) -> float:
    """Returns the median of the time of float32 divided by that of int8."""
    floats = [Side(setting, Variant(False, last)) for last in (False, True)]
    int8 = Side(setting, Variant(True, True))
    warm = [min(_milliseconds(side) for _ in range(2)) for side in (*floats, int8)]
    float32 = floats[0] if warm[0] < warm[1] else floats[1]
    del floats
    return _alternate(float32, int8, seconds)


def _alternate(float32: Side, int8: Side, seconds: float) -> float:
    ratios: list[float] = []
    until = time.perf_counter() + seconds
    while len(ratios) < 3 or time.perf_counter() < until:
        ratios.append(_milliseconds(float32) / _milliseconds(int8))
    return stats.median(ratios)


def _milliseconds(side: Side) -> float:
    return sum(side.step()[0].values())
