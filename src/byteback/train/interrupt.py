# SPDX-License-Identifier: Apache-2.0
"""SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGUSR1: training stops at the end of the current step, and everything is saved.

A job scheduler sends these to every process of a job, so the workers that read data ignore them: the parent ends its workers.
Several signals in a row are one request: torchrun passes on a signal that the group of processes has received already.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_IMPATIENT = 1.0  # seconds after which a second Ctrl-C is not the first one passed on


class Stopped(Exception):
    """Training was interrupted by a signal, and everything is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.code = 128 + number


class Stop:
    """A context manager: after a signal `check` raises Stopped. A second Ctrl-C ends the process at once.

    Before `training` and after it there is nothing to save, so the first signal ends the process. `speaks` is False for a
    process that is one of several and not the first: the first one says that it heard the signal.
    """

    def __init__(self, speaks: bool = True) -> None:
        self.number, self.speaks = 0, speaks
        self.where = "before training"  # for an error of the processes that train together
        self._since, self._training = 0.0, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """From here on, the first signal asks for a checkpoint."""
        self._training = True
        try:
            yield
        finally:
            self._training = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._training:
            raise SystemExit(128 + number)
        now = time.monotonic()
        if self.number == 0:
            self.number, self._since = number, now
            if self.speaks:
                name = signal.Signals(number).name
                _say(f"\nbyteback: received {name}; training stops after this step and saves a checkpoint.\n")
        elif number == signal.SIGINT and now - self._since > _IMPATIENT:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raises Stopped if there was a signal."""
        if self.number:
            raise Stopped(self.number)


def _say(text: str) -> None:
    """Writes to the standard error at once; a handler may run in the middle of another print."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Holds signals back while worker processes start, so that none meets a worker that does not ignore it yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_the_parent() -> None:
    """Makes a worker process ignore the signals. The parent tells its workers when they must end."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
