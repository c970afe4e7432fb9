# SPDX-License-Identifier: Apache-2.0
"""Stops training after some steps, within the process."""

from __future__ import annotations

from typing import Any

from byteback.train.interrupt import Stop, Stopped


class StopsAfter(Stop):
    """Asks for the end after some steps, as Ctrl-C would."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def on_step(self, *_: Any) -> None:
        self.steps -= 1

    def on_epoch(self, *_: Any) -> None: ...

    def say(self, text: str) -> None: ...

    def check(self) -> None:
        if self.steps == 0:
            raise Stopped(2)
