# SPDX-License-Identifier: Apache-2.0
"""Processes that run cases: one that crashes or hangs is a finding about its case, and another takes its place."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

from fuzz import harness
from fuzz.fields import Case
from fuzz.harness import Failure

PATIENCE = 300.0  # seconds for one case: far more than any takes, so that only a deadlock is meant
_spawn = multiprocessing.get_context("spawn")  # a fork would take over OpenMP's threads half alive


class Found(NamedTuple):
    index: int
    case: Case
    failure: Failure
    crashed: bool


def _serve(pipe: Connection) -> None:
    """Answers each case with its failure or None, until there are no more."""
    while (request := pipe.recv()) is not None:
        case, paths = request
        pipe.send(harness.failure_of(case, paths))


class Runner:
    """One process that takes one case after the other; started again after a crash."""

    def __init__(self) -> None:
        self.asked: tuple[int, Case] | None = None
        self._start()

    def _start(self) -> None:
        self.pipe, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, index: int, case: Case, paths: tuple[str, ...] = ()) -> None:
        self.asked = index, case
        self.pipe.send((case, paths))

    def answer(self) -> Found | None:
        """What was found about the case that was asked; waits for it."""
        assert self.asked is not None
        index, case = self.asked
        try:
            if self.pipe.poll(PATIENCE):
                failure = self.pipe.recv()
                return None if failure is None else Found(index, case, failure, False)
            message = f"no answer after {PATIENCE:.0f} seconds"
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode or 0
            message = f"the process died: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
        self.close()
        self._start()
        return Found(index, case, Failure("unknown", message), True)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run(cases: Iterator[tuple[int, Case]], count: int) -> Iterator[tuple[int, Case, Found | None]]:
    """Hands the cases out to `count` processes; yields each with what was found."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # more threads than cores must not spin
    runners = [Runner() for _ in range(count)]
    busy: dict[Connection, Runner] = {}

    def feed(runner: Runner) -> None:
        item = next(cases, None)
        if item is not None:
            runner.ask(*item)
            busy[runner.pipe] = runner

    try:
        for runner in runners:
            feed(runner)
        while busy:
            ready = wait(list(busy), timeout=PATIENCE) or list(busy)
            for pipe in ready:
                runner = busy.pop(pipe)  # type: ignore[call-overload]
                assert runner.asked is not None
                asked = runner.asked
                found = runner.answer()
                yield *asked, found
                feed(runner)
    finally:
        for runner in runners:
            runner.close()


def smallest(found: Found) -> Found:
    """The smallest case that fails as this one does: on its path, or by a crash."""
    runner = Runner()
    paths = () if found.crashed else (found.failure.path,)
    last = found

    def still_fails(case: Case) -> bool:
        nonlocal last
        runner.ask(found.index, case, paths)
        answer = runner.answer()
        if answer is None or answer.crashed != found.crashed:
            return False
        last = answer
        return True

    try:
        case = harness.shrink(found.case, still_fails, attempts=40 if found.crashed else 600)
    finally:
        runner.close()
    return last if last.case == case else found
