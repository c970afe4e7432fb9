# SPDX-License-Identifier: Apache-2.0
"""`byteback bench recipes`: times a training step of one network under several recipes, in turns.

The networks start from the same weights and use the same data. Malloc is tuned. A ratio is the median over rounds of the time
of the first recipe divided by that of another one.
"""

from __future__ import annotations

import json
import statistics as stats
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from byteback import tables
from byteback.bench.step import StepConfig
from byteback.bench.training_step import Side, Variant
from byteback.inspect.memory import tune_malloc

_WARM, _MIN_ROUNDS = 3, 3


@dataclass(frozen=True)
class RecipesConfig:
    """Time a network's training step under several recipes, in turns."""

    model: str = "resnet50"
    """Name of the network, as in `byteback bench step`."""
    image_size: int | None = None
    """Pixels of a side. The default depends on the network."""
    batch: int | None = None
    """Images per step. The default depends on the network."""
    recipes: tuple[str, ...] = ("unified-int8", "unified-int8:stream=bfloat16")
    """Recipes, with options as in `byteback bench step`. The first is the one that the others are compared with."""
    seconds: float = 20.0
    """Approximate duration of all rounds."""
    json: Path | None = None
    """Write the results to this file."""


def run(config: RecipesConfig, console: Console) -> None:
    """Runs the command."""
    settings = [StepConfig(config.model, config.image_size, config.batch, recipe).setting() for recipe in config.recipes]
    if len(settings) < 2:
        raise ValueError(f"bench recipes: {len(settings)} recipe to compare. Pass two or more after --recipes.")
    tune_malloc()
    sides = [Side(setting, Variant("int8", True)) for setting in settings]
    rounds = _rounds([side.step for side in sides], config.seconds)
    rows, results = [], []
    for index, setting in enumerate(settings):
        ms, ratio = stats.median(turn[index] for turn in rounds), stats.median(turn[0] / turn[index] for turn in rounds)
        rows.append([setting.recipe, f"{ms:.1f}", f"{ratio:.3f}x"])
        results.append({"recipe": setting.recipe, "ms": ms, "ratio": ratio})
    one = settings[0]
    title = f"{one.model}, {one.image_size} pixels, batch {one.batch}: a training step, malloc tuned, {len(rounds)} rounds"
    console.print(tables.build(title, ["recipe", "ms", "as fast as the first"], rows))
    if config.json:
        found = {"model": one.model, "image_size": one.image_size, "batch": one.batch, "recipes": results}
        config.json.write_text(json.dumps(found, indent=2) + "\n")


def _rounds(steps: list[Callable[[], tuple[dict[str, float], float]]], seconds: float) -> list[list[float]]:
    """Returns the milliseconds of a step of each side, for as many rounds as fit into the time."""
    for _ in range(_WARM):
        for step in steps:
            step()
    rounds: list[list[float]] = []
    until = time.perf_counter() + seconds
    while len(rounds) < _MIN_ROUNDS or time.perf_counter() < until:
        rounds.append([sum(step()[0].values()) for step in steps])
    return rounds
