# SPDX-License-Identifier: Apache-2.0
"""Several recipes on the same seed and the same data order, then one table."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from byteback import models, tables
from byteback.recipes import resolve
from byteback.train.config import FLOAT, TrainConfig
from byteback.train.data import digits
from byteback.train.loop import Result, train


def run(config: TrainConfig, console: Console) -> list[Result]:
    """Trains every recipe of the config with a progress bar, and prints the comparison."""
    for recipe in config.recipe:
        if recipe != FLOAT:
            resolve(recipe)  # a misspelt name should fail before the first run, not after it
    models.build(config.model, image_size=8, in_channels=1)  # likewise a misspelt model
    data = digits()
    training, test = data
    console.print(
        f"[bold]{config.model}[/] on {len(training.labels)} handwritten digits of 8x8 pixels "
        f"({len(test.labels)} for the test), {config.epochs} epochs, seed {config.seed}\n"
    )
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"))
    results = []
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        for recipe in config.recipe:
            total = config.epochs * training.steps(config.batch_size)
            task = progress.add_task(recipe, total=total, loss="  -  ")
            results.append(
                train(config, recipe, data, lambda loss, t=task: progress.update(t, advance=1, loss=f"{loss:.3f}"))  # type: ignore[misc]
            )
    console.print()
    console.print(comparison(results))
    return results


def comparison(results: list[Result]) -> object:
    """The closing table; differences are to float32 where it took part."""
    base = next((result for result in results if result.recipe == FLOAT), None)
    rows = [
        [
            result.recipe,
            f"{result.accuracy:.2%}",
            "" if base is None or result is base else f"{100 * (result.accuracy - base.accuracy):+.2f}",
            f"{result.train_loss:.4f}",
            f"{result.test_loss:.4f}",
            f"{result.seconds:.1f} s",
        ]
        for result in results
    ]
    columns = ["recipe", "accuracy", "points", "train loss", "test loss", "time"]
    return tables.build("Same seed, same data order", columns, rows)
