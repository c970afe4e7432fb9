# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM: training stops at the end of the current step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Stopped(Exception):
    """Training was interrupted, and everything is saved."""


class Stop:
    """A context manager: after the first signal `check` raises Stopped; a second signal ends the process at once."""

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
        """Raises Stopped if there was a signal."""
        if self.requested:
            raise Stopped
