# SPDX-License-Identifier: Apache-2.0
"""The real command `byteback train`: killed at any moment and resumed it ends in the same bits, and its errors help."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from byteback.train.checkpoints import checkpoint
from byteback.train.checkpoints.files import read_lines

SMALL = ("--epochs", "2", "--recipe", "unified-int8", "--no-tensorboard", "--log-every", "5", "--batch-size", "128")


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "byteback", *args]


def byteback(*args: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "160", **environment}
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=300, cwd=cwd, env=env)


def member(run: Path) -> Path:
    return run / "unified-int8" / "seed0"


def interrupted(cwd: Path, number: signal.Signals, after: int, *args: str) -> subprocess.Popen[str]:
    """Starts the command, and sends it a signal as soon as `after` bytes of metrics are written."""
    process = subprocess.Popen(command("train", *args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd)
    metrics = member(cwd / "run") / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.stat().st_size > after:
            process.send_signal(number)
            break
        time.sleep(0.002)
    return process


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    cwd = tmp_path_factory.mktemp("whole")
    done = byteback("train", *SMALL, "--output-dir", "run", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd / "run"


def test_a_run_writes_what_the_docs_promise(whole: Path) -> None:
    records = read_lines(member(whole) / "metrics.jsonl")
    kinds = [record["kind"] for record in records]
    assert kinds[0] == "start" and kinds[-1] == "end" and kinds.count("epoch") == kinds.count("layers") == 2
    assert {"loss", "accuracy", "lr", "images_per_second", "deviation", "layers_at_floor"} <= records[1].keys()
    layers = next(record for record in records if record["kind"] == "layers")["layers"]
    assert layers["layer1.0.conv1"]["grad_output"]["deviation"] > 0.0
    assert 0.0 <= next(record for record in records if record["kind"] == "epoch")["data_wait"] < 1.0
    pictures = read_lines(member(whole) / "histograms.jsonl")
    assert {picture["epoch"] for picture in pictures} == {0, 1} and len(pictures) == 14
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["finished"] and summary["rows"][0]["recipe"] == "unified-int8"
    assert summary["members"][0]["saved_bytes"] > 0
    state = checkpoint.fingerprint(checkpoint.load(member(whole) / "last.pt"))
    assert state == records[-1]["state_sha256"] == summary["members"][0]["state_sha256"]
    assert (whole / "config.toml").exists() and (member(whole) / "best.pt").exists()


def test_killed_at_any_moment_and_resumed_it_ends_in_the_same_bits(whole: Path, tmp_path: Path) -> None:
    start = len(read_lines(member(whole) / "metrics.jsonl")[0].__repr__())
    # In the first epoch, and in the second; when exactly is up to the machine.
    killed = interrupted(tmp_path, signal.SIGKILL, start, *SMALL, "--checkpoint-seconds", "0", "--output-dir", "run")
    assert killed.wait(60) == -signal.SIGKILL, killed.communicate()
    time.sleep(0.1)
    size = (member(tmp_path / "run") / "metrics.jsonl").stat().st_size
    killed = interrupted(tmp_path, signal.SIGKILL, size + 2500, "--resume", "run")
    assert killed.wait(60) == -signal.SIGKILL, "it was over before it could be killed"
    done = byteback("train", "--resume", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ends = [read_lines(member(run) / "metrics.jsonl") for run in (whole, tmp_path / "run")]
    assert ends[0][-1]["state_sha256"] == ends[1][-1]["state_sha256"]
    steps = [[(r["step"], r["loss"], r["accuracy"]) for r in end if r["kind"] == "step"] for end in ends]
    assert steps[0] == steps[1], "a step is missing, there twice, or different"
    pictures = [read_lines(member(run) / "histograms.jsonl") for run in (whole, tmp_path / "run")]
    assert pictures[0] == pictures[1]


def test_ctrl_c_saves_and_names_the_command_that_goes_on(whole: Path, tmp_path: Path) -> None:
    process = interrupted(tmp_path, signal.SIGINT, 3000, *SMALL, "--output-dir", "run")
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "byteback train --resume run" in out and "Traceback" not in error
    stopped = checkpoint.load(member(tmp_path / "run") / "last.pt")
    assert 0 < stopped["progress"]["step"] < 24
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["members"][0]["state"] == "stopped"
    refused = byteback("train", "--resume", "run", "--lr", "0.3", cwd=tmp_path)
    assert refused.returncode == 1 and "started with lr = 0.1" in refused.stderr
    again = byteback("train", "--resume", "run", "--workers", "1", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    hashes = [read_lines(member(run) / "metrics.jsonl")[-1]["state_sha256"] for run in (whole, tmp_path / "run")]
    assert hashes[0] == hashes[1]


def test_a_finished_run_is_not_trained_again_and_more_members_may_join(whole: Path) -> None:
    before = (member(whole) / "last.pt").stat().st_mtime_ns
    done = byteback("train", "--resume", "run", "--recipe", "unified-int8", "float32", cwd=whole.parent)
    assert done.returncode == 0, done.stderr
    assert "unified-int8 seed 0 is already finished" in done.stdout and "float32 seed 0" in done.stdout
    assert (member(whole) / "last.pt").stat().st_mtime_ns == before
    rows = json.loads((whole / "summary.json").read_text())["rows"]
    assert [row["recipe"] for row in rows] == ["unified-int8", "float32"] and rows[0]["ratio_to_float32"] > 0
    tested = byteback("train", "--resume", "run", "--test-only", cwd=whole.parent)
    assert tested.returncode == 0 and tested.stdout.count("accuracy") == 2, tested.stdout + tested.stderr


def test_a_member_that_diverges_is_a_result_and_the_others_go_on(tmp_path: Path) -> None:
    recipes = ("--recipe", "plain-int8", "float32", "--lr", "1e30", "--epochs", "1", "--output-dir", "run")
    done = byteback("train", *recipes, "--no-tensorboard", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("diverged in epoch 1: ") == 2 and "1 diverged" in done.stdout
    assert "Every member diverged, so there is no result. First: " in done.stdout
    states = [found["state"] for found in json.loads((tmp_path / "run" / "summary.json").read_text())["members"]]
    assert states == ["diverged", "diverged"]


def test_eval_gives_the_accuracy_that_training_saw(whole: Path) -> None:
    path = member(whole) / "last.pt"
    done = byteback("eval", str(path), cwd=whole)
    assert done.returncode == 0, done.stderr
    assert f"accuracy {checkpoint.load(path)['progress']['test_accuracy']:.2%}" in done.stdout


def test_a_read_only_folder_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    # Permissions do not stop root; /proc stops everyone.
    where = "/proc/byteback" if os.access(tmp_path / "closed", os.W_OK) else "closed/run"
    done = byteback("train", *SMALL, "--output-dir", where, cwd=tmp_path)
    assert done.returncode == 1 and "cannot write to" in done.stderr and "Traceback" not in done.stderr
    assert "epoch 1" not in done.stdout


def test_a_corrupt_checkpoint_and_a_taken_folder_are_errors(whole: Path, tmp_path: Path) -> None:
    taken = byteback("train", *SMALL, "--output-dir", "run", cwd=whole.parent)
    assert taken.returncode == 1 and "already contains a run" in taken.stderr
    run = tmp_path / "run"
    member(run).mkdir(parents=True)
    (run / "config.toml").write_text((whole / "config.toml").read_text().replace(', "float32"', ""))
    (member(run) / "last.pt").write_bytes((member(whole) / "last.pt").read_bytes()[:-2000])
    done = byteback("train", "--resume", "run", cwd=tmp_path)
    assert done.returncode == 1 and "last.pt: the checkpoint is damaged" in done.stderr and "Traceback" not in done.stderr
    assert (member(run) / "last.pt").exists(), "what is left of it is the user's to throw away"
