# SPDX-License-Identifier: Apache-2.0
"""`torchrun -m byteback train`: a rank that does not come, dies, hangs or gets a signal."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from os import kill
from pathlib import Path

import pytest
import torch

from byteback.train.checkpoints import checkpoint
from byteback.train.checkpoints.files import read_lines
from launched import RECIPE, SMALL, by_hand, children, ended, free_port, member, sha, torchrun, wait_for

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
AGAIN = ("--checkpoint-seconds", "0", "--resume", "auto")


def test_a_missing_rank_is_named_and_all_that_came_end(tmp_path: Path) -> None:
    port = free_port()
    here, there = ended([by_hand(tmp_path, rank, port, "--rank-timeout", "10", ranks=3) for rank in range(2)])
    assert here[0] == there[0] == 1 and there[1] == ""
    assert "rank 2 of 3 processes did not come to 127.0.0.1" in here[1] and "within 10 s" in here[1], here[1]
    assert here[1].count("\n") == 1 and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_nobody_comes(tmp_path: Path) -> None:
    for rank in range(2):
        ((code, error),) = ended([by_hand(tmp_path, rank, free_port(), "--rank-timeout", "2")])
        assert code == 1 and "Traceback" not in error, error
        assert rank or ("2 processes" in error and "within 2 s" in error)


# ---- slow ----


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nobody disturbed."""
    cwd = tmp_path_factory.mktemp("whole")
    process = torchrun(cwd, *SMALL, *RECIPE, "--output-dir", "run")
    _, error = process.communicate(timeout=900)
    assert process.returncode == 0, error
    return cwd / "run"


def _in_a_checkpoint(process: subprocess.Popen[str], run: Path) -> bool:
    """Kills rank 0 while it writes a checkpoint. Returns whether the checkpoint is incomplete."""
    writing = member(run) / "last.pt.writing"
    victim = children(process)[0]
    while process.poll() is None and not writing.exists():
        pass
    kill(victim, signal.SIGKILL)
    time.sleep(0.1)  # it is dead now; torchrun starts others after some seconds
    return writing.exists()


@pytest.mark.slow
def test_twenty_runs_with_a_rank_killed_at_a_random_moment(whole: Path, tmp_path: Path) -> None:
    """Every fourth before or after the first steps, every fourth of them in a checkpoint, the others between."""
    draw = random.Random(0)
    restarted = incomplete = 0
    for number in range(20):
        run = tmp_path / f"run{number}"
        process = torchrun(tmp_path, *SMALL, *RECIPE, *AGAIN, "--output-dir", run.name, restarts=3)
        if number % 4 == 0:
            while not children(process):
                time.sleep(0.01)
            time.sleep(draw.random() * 8)
        else:
            wait_for(process, run, draw.randrange(1, 22))
        if number % 4 == 1:
            incomplete += _in_a_checkpoint(process, run)
        else:
            time.sleep(draw.random() * 0.05)
            for victim in draw.sample(children(process), 1) if children(process) else []:
                kill(victim, signal.SIGKILL)
        _, error = process.communicate(timeout=900)
        assert process.returncode == 0, (number, error)
        assert "Traceback" not in error.replace("torch/distributed", ""), (number, error)
        restarted += "-9" in error
        assert sha(run) == sha(whole), number
        steps = [record["step"] for record in read_lines(member(run) / "metrics.jsonl") if record["kind"] == "step"]
        assert steps == list(range(1, 25)), number
    print(f"{restarted} of 20 runs were restarted, {incomplete} of 5 with an incomplete checkpoint")
    assert restarted >= 15 and incomplete >= 3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_signal_stops_all_ranks_at_one_step_and_another_number_goes_on(ranks: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = torchrun(tmp_path, *SMALL, *RECIPE, "--output-dir", "run")
    wait_for(process, run, 6)
    kill(children(process)[1], signal.SIGUSR1)  # not the rank that writes
    out, _ = process.communicate(timeout=900)
    assert process.returncode != 0 and "Stopped; everything is saved" in out
    stopped = checkpoint.load(member(run) / "last.pt")["progress"]["step"]
    assert 0 < stopped < 24
    process = torchrun(tmp_path, "--resume", "run", ranks=ranks)
    out, error = process.communicate(timeout=900)
    assert process.returncode == 0, error
    assert f"The run was started with 2 processes and goes on with {ranks}. A step still has 120 images" in out
    records = read_lines(member(run) / "metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, 25))
    assert records[-1]["test_accuracy"] > 0.8


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    port = free_port()
    processes = [by_hand(tmp_path, rank, port, "--rank-timeout", "120", "--output-dir", "run") for rank in range(2)]
    wait_for(processes[0], tmp_path / "run", 4)
    processes[1].send_signal(signal.SIGSTOP)
    try:
        _, error = processes[0].communicate(timeout=600)
    finally:
        processes[1].kill()
    assert processes[0].returncode == 1 and f"process {processes[1].pid}) did not answer in unified-int8 seed 0" in error, error
    assert "--resume auto" in error and "Traceback" not in error
