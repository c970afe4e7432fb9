# SPDX-License-Identifier: Apache-2.0
"""Starts `byteback train` in several processes, with torchrun or one by one, for the tests that disturb them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from byteback.train.checkpoints.files import read_lines

RECIPE = ("--recipe", "unified-int8")
SMALL = ("--epochs", "2", "--batch-size", "60", "--threads", "1", "--no-tensorboard", "--log-every", "1")
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "200"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TRAIN = ("-m", "byteback", "train")


def start(command: Sequence[str], cwd: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, **QUIET, **environment},
    )


def torchrun(cwd: Path, *args: str, ranks: int = 2, restarts: int = 0) -> subprocess.Popen[str]:
    launcher = ("--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts))
    return start([*TORCHRUN, *launcher, *TRAIN, *args], cwd)


def by_hand(cwd: Path, rank: int, port: int, *args: str, ranks: int = 2) -> subprocess.Popen[str]:
    """One process as another launcher would start it."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return start([sys.executable, *TRAIN, *SMALL, *RECIPE, "--histogram-every", "0", *args], cwd, **place)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit codes and errors."""
    try:
        outputs = [process.communicate(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, (_, error) in zip(processes, outputs, strict=True)]


def children(process: subprocess.Popen[str]) -> list[int]:
    """The ranks that a torchrun has started, in their order."""
    try:
        return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


def member(run: Path) -> Path:
    return run / "unified-int8" / "seed0"


def sha(run: Path) -> str:
    return str(read_lines(member(run) / "metrics.jsonl")[-1]["state_sha256"])


def wait_for(process: subprocess.Popen[str], run: Path, records: int) -> None:
    """Waits until the journal of a run has so many records."""
    metrics = member(run) / "metrics.jsonl"
    deadline = time.monotonic() + 900
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= records:
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate())
