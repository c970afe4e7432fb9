# SPDX-License-Identifier: Apache-2.0
"""Signals: training stops after a step, everything is saved, and the exit code says which signal it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from byteback.train import interrupt
from byteback.train.checkpoints import checkpoint
from byteback.train.checkpoints.files import read_lines
from small_runs import SMALL, picture_folder


def test_a_signal_to_the_whole_group_saves_and_says_so(tmp_path: Path) -> None:
    """As a job scheduler sends it: the workers get it too. Again while it is on its way, as torchrun passes it on."""
    folder = picture_folder(tmp_path / "pictures", 96)
    args = ("--data", f"folder:{folder}", "--image-size", "32", "--batch-size", "4", "--epochs", "500", "--workers", "2")
    command = [sys.executable, "-m", "byteback", "train", *SMALL[:3], *args, "--recipe", "plain-int8", "--model", "resnet8"]
    process = subprocess.Popen(
        [*command, "--threads", "1", "--log-every", "1", "--output-dir", "run"],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path, "start_new_session": True},
    )
    metrics = tmp_path / "run" / "plain-int8" / "seed0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size > 6000):
        time.sleep(0.01)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGTERM)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, error
    assert "received SIGTERM; training stops after this step" in error and "Traceback" not in error
    assert "byteback train --resume run" in out
    last = checkpoint.load(metrics.with_name("last.pt"))["progress"]["step"]
    assert last >= max(record["step"] for record in read_lines(metrics) if record["kind"] == "step") > 0


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_each_signal_asks_for_a_checkpoint_and_ends_with_its_number(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with interrupt.Stop() as stop:
        with pytest.raises(SystemExit) as ended:  # nothing to save yet
            os.kill(os.getpid(), number)
        assert ended.value.code == 128 + number
        with stop.training():
            for _ in range(3):  # the same request
                os.kill(os.getpid(), number)
            assert f"received {name}" in capfd.readouterr().err
            with pytest.raises(interrupt.Stopped) as stopped:
                stop.check()
    assert stopped.value.code == 128 + number and signal.getsignal(number) == before


def test_only_a_later_ctrl_c_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    with interrupt.Stop(speaks=False) as stop, stop.training():
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] = 5.0
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler that repeats itself
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
