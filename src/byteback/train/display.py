# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of training: a bar, a line with speed, loss and accuracy, and a line with the health of the int8 layers.

If the output is not a terminal, it prints one line per epoch instead.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text
from torch import nn

from byteback import tables
from byteback.train.checkpoints.checkpoint import Progress as State
from byteback.train.loop import Member
from byteback.train.records import watch

_SECONDS = 0.5  # between two updates


class Display:
    """Shows what the loop reports. Use it as a context manager."""

    def __init__(self, console: Console, members: int, epochs: int, score: str) -> None:
        self.console, self.members, self.epochs = console, members, epochs
        self.test = "test" if score == "accuracy" else f"test {score}"
        self.counts = score == "accuracy"  # only then there is a training accuracy
        self.started, self.looked = 0, 0.0
        self.name, self.accuracy, self.smoothed = "", "", 0.0
        name = TextColumn("{task.fields[number]} {task.description}", style="bold", markup=False)
        columns = (name, TextColumn("{task.fields[epoch]}"), BarColumn(bar_width=20), TextColumn("{task.fields[left]}"))
        self.bar = Progress(*columns, console=console)
        self.task: TaskID | None = None
        self.speed, self.health = Text(""), Text("", style="dim")
        self.live = Live(Group(self.bar, self.speed, self.health), console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def begin(self, member: Member) -> None:
        """Starts the next member."""
        self.started += 1
        self.name, self.accuracy, self.smoothed = f"{member.variant.name} seed {member.seed}", "", 0.0
        if self.task is not None:
            self.bar.remove_task(self.task)
        self.task = self.bar.add_task(self.name, total=None, number=f"{self.started}/{self.members}", epoch="", left="")
        self.speed.plain = self.health.plain = ""

    def on_step(self, progress: State, loss: float, steps: int, model: nn.Module) -> None:
        self.smoothed = loss if self.smoothed == 0.0 else 0.95 * self.smoothed + 0.05 * loss
        now = time.monotonic()
        if not self.console.is_terminal or self.task is None or now - self.looked < _SECONDS:
            return
        self.looked = now
        left = progress.seconds / max(progress.in_epoch, 1) * (steps * self.epochs - progress.step)
        epoch = f"epoch {min(progress.epoch + 1, self.epochs)}/{self.epochs}"
        self.bar.update(self.task, total=steps * self.epochs, completed=progress.step, epoch=epoch, left=f"{_clock(left)} left")
        seconds = max(progress.seconds, 1e-9)
        self.speed.plain = (
            f"    {tables.rate(progress.images / seconds)} images/s, {progress.wait_seconds / seconds:.1%} waiting for data; "
            f"loss {self.smoothed:.3f}"
            + (f", train {progress.correct / max(progress.images, 1):.1%}" if self.counts else "")
            + (f", {self.test} {self.accuracy}" if self.accuracy else "")
        )
        health = str(watch.health_line(model))
        self.health.plain = f"    {health}" if health else ""

    def on_epoch(self, record: dict[str, Any]) -> None:
        self.accuracy = f"{record['test_accuracy']:.2%}"
        if not self.console.is_terminal:
            self.console.print(
                f"{self.name}  epoch {record['epoch'] + 1}/{self.epochs}  loss {record['train_loss']:.4f}  "
                f"{self.test} {record['test_accuracy']:.2%}  {tables.rate(record['images_per_second'])} images/s  "
                f"waiting for data {record['data_wait']:.1%}  {record['seconds']:.1f} s",
                highlight=False,
            )

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self.console.print(text, highlight=False)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
