# SPDX-License-Identifier: Apache-2.0
"""How it goes, live: a bar with speed, loss and accuracy, and the health of the int8 layers below it.

Where the output is no terminal there is one line per epoch instead.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text
from torch import nn

from byteback.train import watch
from byteback.train.checkpoint import Progress as State
from byteback.train.loop import Member

_SECONDS = 0.5  # between two looks at the layers


class Display:
    """Listens to the loop and shows what it hears; use it as a context."""

    def __init__(self, console: Console, members: int, epochs: int) -> None:
        self.console, self.members, self.epochs = console, members, epochs
        self.started, self.looked = 0, 0.0
        self.name, self.accuracy, self.speed, self.smoothed = "", "", 0.0, 0.0
        columns = ("{task.fields[number]}", "[bold]{task.description}", "epoch {task.fields[epoch]}")
        values = (
            "{task.fields[speed]} images/s",
            "loss {task.fields[loss]}",
            "{task.fields[accuracy]}",
            "{task.fields[left]} left",
        )
        self.bar = Progress(*map(TextColumn, columns), BarColumn(bar_width=24), *map(TextColumn, values), console=console)
        self.task: TaskID | None = None
        self.health = Text("", style="dim")
        self.live = Live(Group(self.bar, self.health), console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def begin(self, member: Member) -> None:
        """The next member."""
        self.started += 1
        self.name, self.accuracy, self.smoothed, self.speed = f"{member.variant.name} seed {member.seed}", "", 0.0, 0.0
        if self.task is not None:
            self.bar.remove_task(self.task)
        number = f"{self.started}/{self.members}"
        empty: dict[str, Any] = dict.fromkeys(("epoch", "speed", "loss", "accuracy", "left"), "-")
        self.task = self.bar.add_task(self.name, total=None, number=number, **empty)
        self.health.plain = ""

    def on_step(self, progress: State, loss: float, steps: int, model: nn.Module) -> None:
        self.smoothed = loss if self.smoothed == 0.0 else 0.95 * self.smoothed + 0.05 * loss
        now = time.monotonic()
        if not self.console.is_terminal or self.task is None or now - self.looked < _SECONDS:
            return
        self.looked = now
        per_step = progress.seconds / max(progress.in_epoch, 1)
        trained = f"train {progress.correct / max(progress.images, 1):.1%}"
        self.bar.update(
            self.task,
            total=steps * self.epochs,
            completed=progress.step,
            epoch=f"{min(progress.epoch + 1, self.epochs)}/{self.epochs}",
            speed=f"{progress.images / max(progress.seconds, 1e-9):,.0f}",
            loss=f"{self.smoothed:.3f}",
            accuracy=trained + (f" test {self.accuracy}" if self.accuracy else ""),
            left=_clock(per_step * (steps * self.epochs - progress.step)),
        )
        waiting = progress.wait_seconds / max(progress.seconds, 1e-9)
        health = str(watch.health_line(model))
        self.health.plain = f"    {waiting:.1%} of the time waiting for data" + (f"; {health}" if health else "")

    def on_epoch(self, record: dict[str, Any]) -> None:
        self.accuracy = f"{record['test_accuracy']:.2%}"
        if not self.console.is_terminal:
            self.console.print(
                f"{self.name}  epoch {record['epoch'] + 1}/{self.epochs}  loss {record['train_loss']:.4f}  "
                f"test {record['test_accuracy']:.2%}  {record['images_per_second']:,.0f} images/s  "
                f"waiting for data {record['data_wait']:.1%}  {record['seconds']:.1f} s",
                highlight=False,
            )

    def say(self, text: str) -> None:
        """A line above the bar."""
        self.console.print(text, highlight=False)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
