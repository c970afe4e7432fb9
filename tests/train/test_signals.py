# SPDX-License-Identifier: Apache-2.0
"""Each signal, to the process and to its group, at twenty random moments with and without workers: nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from small_runs import picture_folder

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("signal_days.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    picture_folder(folder / "pictures", 64)
    return folder


def report(folder: Path, *args: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), *args, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=7200, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    """The state at the end of a run without signals."""
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
    code += "import signal_days, pathlib\n"
    code += f"folder = pathlib.Path({str(folder)!r})\n"
    code += "assert signal_days.wait(signal_days.begin(folder, 'whole', '0')) == 0\n"
    code += "print(signal_days.Run(folder, 'whole').end())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=2000)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("target", ["process", "group"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_twenty_signals_lose_nothing(name: str, target: str, workers: str, folder: Path, undisturbed: str) -> None:
    number = getattr(signal, name)
    found = json.loads(report(folder, name, target, workers))
    heard = 0
    for one in found["attempts"]:
        assert one["alone"] and not one["traceback"], one["log"]
        assert one["saved"] >= one["before"], one
        if one["heard"]:
            heard += 1
            # a checkpoint of the step that it was in, unless that was the last one
            assert one["code"] in (128 + number, 0) and one["saved"] >= one["logged"], one
        else:  # before training or after it: there is nothing to save
            assert one["code"] in (128 + number, -number, 0), one
    print(f"{name} to the {target}, {workers} workers: {heard} of {len(found['attempts'])} signals met training")
    assert len(found["attempts"]) == 20 and heard >= 8
    assert set(found["ends"]) == {undisturbed} and undisturbed
    assert all(steps == list(range(1, len(steps) + 1)) and len(steps) == 16 * 12 for steps in found["steps"])
