# SPDX-License-Identifier: Apache-2.0
"""`byteback bench growth`: the speed-up of a training step for several batch sizes and image sizes.

Every cell is the median ratio of float32 (in its faster memory format) to int8, and in a second table that of bf16 autocast to
int8, on a CPU with bfloat16 instructions. The sides take turns in one process, with malloc tuned.
"""

from __future__ import annotations

import json
import statistics as stats
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from byteback import tables
from byteback.bench.training_step import Numbers, Setting, Side, Variant
from byteback.inspect import machine
from byteback.inspect.memory import tune_malloc

_TITLES = {"fp32": "FP32", "bf16": "bf16 autocast"}
_WARM, _MIN_ROUNDS = 2, 3


@dataclass(frozen=True)
class GrowthConfig:
    """Time a training step against PyTorch FP32 and bf16 autocast for several batch sizes and image sizes."""

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
    why = machine.why_no_bf16()
    if why:
        console.print(f"bf16 autocast is left out: {why}\n")
    others: list[Numbers] = ["fp32"] if why else ["fp32", "bf16"]
    pairs = [(b, i) for b in config.batches for i in config.images if b * i * i <= config.most_pixels]
    cells: dict[tuple[int, int], dict[str, float]] = {}
    for batch, image in track(pairs, description="batch x image", console=console, transient=True):
        cells[batch, image] = step_ratios(Setting(config.model, image, batch, config.recipe), others, config.seconds)
    for numbers in others:
        rows = [
            [str(batch), *(f"{cells[batch, i][numbers]:.2f}x" if (batch, i) in cells else "-" for i in config.images)]
            for batch in config.batches
        ]
        title = f"{config.model}, {config.recipe}: a training step against PyTorch {_TITLES[numbers]}, malloc tuned"
        console.print(tables.build(title, ["batch", *(f"{image} pixels" for image in config.images)], rows))
    if config.json:
        results = [
            {"batch": batch, "image_size": image, "ratio": ratios["fp32"], "ratio_bf16": ratios.get("bf16")}
            for (batch, image), ratios in cells.items()
        ]
        config.json.write_text(json.dumps({"model": config.model, "recipe": config.recipe, "cells": results}, indent=2) + "\n")


def step_ratios(setting: Setting, others: Sequence[Numbers], seconds: float) -> dict[str, float]:
    """Returns for each of the others the median of its time divided by that of int8."""
    chosen = {numbers: _faster(setting, numbers) for numbers in others}
    int8 = Side(setting, Variant("int8", True))
    for _ in range(_WARM):
        int8.step()
    ratios: dict[str, list[float]] = {numbers: [] for numbers in others}
    rounds, until = 0, time.perf_counter() + seconds
    while rounds < _MIN_ROUNDS or time.perf_counter() < until:
        round_ms = {numbers: _milliseconds(side) for numbers, side in chosen.items()}
        int8_ms = _milliseconds(int8)
        for numbers, ms in round_ms.items():
            ratios[numbers].append(ms / int8_ms)
        rounds += 1
    return {numbers: stats.median(values) for numbers, values in ratios.items()}


def _faster(setting: Setting, numbers: Numbers) -> Side:
    """Returns the side in the memory format that is faster after it has warmed up."""
    sides = [Side(setting, Variant(numbers, last)) for last in (False, True)]
    return min(sides, key=lambda side: min(_milliseconds(side) for _ in range(_WARM)))


def _milliseconds(side: Side) -> float:
    return sum(side.step()[0].values())
