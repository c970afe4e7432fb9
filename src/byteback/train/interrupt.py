# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM: a request to stop, which training grants at the end of its step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Stopped(Exception):
    """Training was asked to stop, and everything is saved."""


class Stop:
    """Within it, the first signal is a request that `check` grants; a second one ends the process where it is."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def check(self) -> None:
        """Raises Stopped if somebody asked for it."""
        if self.requested:
            raise Stopped
