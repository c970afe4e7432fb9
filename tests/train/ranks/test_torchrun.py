# SPDX-License-Identifier: Apache-2.0
"""`torchrun -m byteback train`: one run of several processes, which a killed rank and a restart do not change by a bit."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from byteback.train.checkpoints import checkpoint
from byteback.train.checkpoints.files import read_lines

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")

RECIPE = ("--recipe", "unified-int8")
SMALL = ("--epochs", "2", "--batch-size", "60", "--threads", "1", "--no-tensorboard", "--log-every", "1")
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "200"}


def torchrun(cwd: Path, *args: str, ranks: int = 2, restarts: int = 0) -> subprocess.Popen[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts))
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "byteback", "train", *args],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": cwd, "env": {**os.environ, **QUIET}},
    )


def member(run: Path) -> Path:
    return run / "unified-int8" / "seed0"


def sha(run: Path) -> str:
    return str(read_lines(member(run) / "metrics.jsonl")[-1]["state_sha256"])


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def wait_for(process: subprocess.Popen[str], metrics: Path, records: int) -> None:
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= records:
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two ranks that nobody disturbed, and what it printed."""
    cwd = tmp_path_factory.mktemp("whole")
    process = torchrun(cwd, *SMALL, *RECIPE, "--output-dir", "run")
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return cwd / "run", out


@pytest.mark.slow
def test_a_killed_rank_is_restarted_and_nothing_changes(whole: tuple[Path, str], tmp_path: Path) -> None:
    again = ("--checkpoint-seconds", "0", "--output-dir", "run", "--resume", "auto")
    process = torchrun(tmp_path, *SMALL, *RECIPE, *again, restarts=2)
    wait_for(process, member(tmp_path / "run") / "metrics.jsonl", 8)
    os.kill(children(process)[-1], signal.SIGKILL)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert "-9" in error and out.count("Its report page is") == 1
    assert sha(tmp_path / "run") == sha(whole[0])


@pytest.mark.slow
def test_a_signal_stops_all_ranks_at_one_step_and_another_number_goes_on(tmp_path: Path) -> None:
    process = torchrun(tmp_path, *SMALL, *RECIPE, "--output-dir", "run")
    wait_for(process, member(tmp_path / "run") / "metrics.jsonl", 6)
    os.kill(children(process)[1], signal.SIGUSR1)  # not the rank that writes
    out, _ = process.communicate(timeout=120)
    assert process.returncode != 0 and "Stopped; everything is saved" in out
    stopped = checkpoint.load(member(tmp_path / "run") / "last.pt")["progress"]["step"]
    assert 0 < stopped < 24
    alone = [sys.executable, "-m", "byteback", "train", "--resume", "run"]
    done = subprocess.run(alone, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **QUIET}, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "The run was started with 2 processes and goes on with 1. A step still has 120 images" in done.stdout
    records = read_lines(member(tmp_path / "run") / "metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, 25))


def by_hand(cwd: Path, rank: int, port: int, *args: str, ranks: int = 2) -> subprocess.Popen[str]:
    """One process as another launcher would start it."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-m", "byteback", "train", *SMALL, *RECIPE, "--histogram-every", "0", *args],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": cwd},
        env={**os.environ, **QUIET, **place},
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    outputs = [process.communicate(timeout=200) for process in processes]
    return [(process.returncode, error) for process, (_, error) in zip(processes, outputs, strict=True)]


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    ((code, error),) = ended([by_hand(tmp_path, 0, free_port(), "--rank-timeout", "2")])
    assert code == 1 and "2 processes" in error and "within 2 s" in error and "Traceback" not in error


# ---- slow ----


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    port = free_port()
    processes = [by_hand(tmp_path, rank, port, "--rank-timeout", "20", "--output-dir", "run") for rank in range(2)]
    wait_for(processes[0], member(tmp_path / "run") / "metrics.jsonl", 4)
    processes[1].send_signal(signal.SIGSTOP)
    try:
        _, error = processes[0].communicate(timeout=120)
    finally:
        processes[1].kill()
    assert processes[0].returncode == 1 and f"process {processes[1].pid}) did not answer in unified-int8 seed 0" in error, error
    assert "--resume auto" in error and "Traceback" not in error


@pytest.mark.slow
def test_twenty_runs_with_a_rank_killed_at_a_random_moment(whole: tuple[Path, str], tmp_path: Path) -> None:
    draw = random.Random(0)
    again = ("--checkpoint-seconds", "0", "--resume", "auto")
    restarted = 0
    for number in range(20):
        process = torchrun(tmp_path, *SMALL, *RECIPE, *again, "--output-dir", f"run{number}", restarts=3)
        wait_for(process, member(tmp_path / f"run{number}") / "metrics.jsonl", draw.randrange(1, 22))
        time.sleep(draw.random() * 0.05)
        victims = children(process)
        if victims:
            os.kill(draw.choice(victims), signal.SIGKILL)
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, (number, error)
        restarted += "-9" in error
        assert sha(tmp_path / f"run{number}") == sha(whole[0]), number
    assert restarted >= 15


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("recipe", ["plain-int8", "unified-int8", "distribution-adaptive-int8"])
def test_four_ranks_and_every_recipe(ranks: int, recipe: str, tmp_path: Path) -> None:
    process = torchrun(tmp_path, *SMALL, "--recipe", recipe, "--output-dir", "run", ranks=ranks)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rows"][0]["accuracy"] > 0.7
