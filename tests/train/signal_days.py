# SPDX-License-Identifier: Apache-2.0
"""What test_signals.py starts: one run of the trainer that gets a signal at twenty random moments, and goes on after each.

This process has trained once, so that everything is imported, and each attempt is a fork of it: an attempt takes a second
and not ten.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from byteback import cli
from byteback.train.checkpoints import checkpoint
from byteback.train.checkpoints.files import read_lines

EPOCHS, MOMENTS = 16, 20
PATIENCE = 1500.0  # seconds for the rest of a run, on a machine with other work
ARGS = ("--image-size", "16", "--model", "resnet8", "--recipe", "unified-int8", "--epochs", str(EPOCHS), "--batch-size", "4")
ARGS += ("--threads", "1", "--no-tensorboard", "--histogram-every", "0", "--log-every", "1", "--checkpoint-seconds", "0.2")


def command(output: str, workers: str, *more: str) -> list[str]:
    run = ("--workers", workers, "--output-dir", output, "--resume", "auto")
    return ["byteback", "train", "--data", "folder:pictures", *ARGS, *run, *more]


def warm_up(folder: Path) -> None:
    """Trains an epoch in this process."""
    before = os.getcwd()
    os.chdir(folder)
    sys.argv = command(f"warm{os.getpid()}", "0", "--epochs", "1")
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main()
    os.chdir(before)
    assert "The run is in" in out.getvalue()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would miss the other threads"


def begin(folder: Path, output: str, workers: str) -> int:
    """Starts `byteback train` in a group of processes of its own. Returns its process."""
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what runs in the background ignore it
        os.chdir(folder)
        log = os.open(f"{output}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = command(output, workers)
        cli.main()
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:  # before the command line has begun
        code = 130
    finally:
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 1)


def wait(pid: int) -> int:
    """Returns the exit code of an attempt; minus the signal that ended it."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    raise AssertionError("it does not end")


def alone(pid: int) -> bool:
    """Whether no process of the group is left, some moments after its first one has ended."""
    for _ in range(3000):
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


class Run:
    """What is on the disk."""

    def __init__(self, folder: Path, output: str) -> None:
        self.member, self.log = folder / output / "unified-int8" / "seed0", folder / f"{output}.log"

    def lines(self) -> int:
        """How many lines of the journal there are. Parsing them again and again would slow down the run that is watched."""
        metrics = self.member / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def steps(self) -> list[int]:
        return [record["step"] for record in read_lines(self.member / "metrics.jsonl") if record["kind"] == "step"]

    def saved(self) -> int:
        last = self.member / "last.pt"
        return int(checkpoint.load(last)["progress"]["step"]) if last.exists() else 0

    def end(self) -> str:
        records = read_lines(self.member / "metrics.jsonl")
        return str(records[-1].get("state_sha256", "")) if records else ""


def attempt(folder: Path, output: str, workers: str, number: int, whole_group: bool, draw: random.Random) -> dict[str, Any]:
    """Sends one signal at a random moment: some time after the start, or some time after some steps."""
    run = Run(folder, output)
    before, logged = run.saved(), run.lines()
    run.log.write_text("")  # a signal may come before the new process does that
    pid = begin(folder, output, workers)
    deadline = time.monotonic() + PATIENCE
    if draw.random() < 0.8:
        ahead = draw.randrange(1, 9)
        while run.lines() < logged + ahead and os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.005)
    time.sleep(draw.random() * 0.4)
    found: dict[str, Any] = {"met": True, "code": None}
    try:
        (os.killpg if whole_group else os.kill)(pid, number)
        found["code"] = wait(pid)
    except (ProcessLookupError, ChildProcessError):  # it had ended
        found["met"] = False
    log = run.log.read_text()
    found |= {"heard": "; training stops after this step" in log, "traceback": "Traceback" in log, "alone": alone(pid)}
    found |= {"before": before, "saved": run.saved(), "logged": max(run.steps(), default=0), "log": log[-2000:]}
    return found


def main(name: str, target: str, workers: str, folder: Path) -> None:
    torch.set_num_threads(1)
    warm_up(folder)
    number, draw = getattr(signal, name), random.Random(f"{name} {target} {workers}")
    found: dict[str, Any] = {"attempts": [], "ends": [], "steps": []}
    runs = 0
    while len(found["attempts"]) < MOMENTS:
        output = f"{name}-{target}-{workers}-{runs}"
        one = attempt(folder, output, workers, number, target == "group", draw)
        if one["met"]:
            found["attempts"].append(one)
        if Run(folder, output).end() or len(found["attempts"]) == MOMENTS:
            assert wait(begin(folder, output, workers)) == 0
            found["ends"].append(Run(folder, output).end())
            found["steps"].append(Run(folder, output).steps())
            runs += 1
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
