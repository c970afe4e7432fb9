# SPDX-License-Identifier: Apache-2.0
"""The real command, run as a user runs it: what it prints, and how it fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from byteback.ops import native


def byteback(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "byteback", *args],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "160", **environment},
    )


def test_train_compares_float_with_a_recipe_on_embedded_data() -> None:
    done = byteback("train", "--epochs", "1", "--recipe", "float32", "unified-int8")
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("Same seed, same data order")[1]
    assert "float32" in table and "unified-int8" in table and "accuracy" in table


@pytest.mark.parametrize(
    ("args", "says"),
    [
        pytest.param(["train", "--recipe", "unifed-int8"], "Did you mean 'unified-int8'?", id="misspelt recipe"),
        pytest.param(["train", "--epochs", "0"], "at least 1 epoch", id="no epoch"),
        pytest.param(["train", "--model", "resnet21"], "resnet20", id="misspelt model"),
        pytest.param(["train", "--lr", "fast"], "lr", id="word for a number"),
        pytest.param(["bench", "kernels", "--shapes", "resnet19"], "resnet18", id="misspelt network"),
        pytest.param(["bench", "kernels", "--shapes", "absent.csv"], "absent.csv", id="missing file"),
    ],
)
def test_a_mistake_ends_with_a_message_that_helps(args: list[str], says: str) -> None:
    done = byteback(*args)
    assert done.returncode != 0
    printed = (done.stdout + done.stderr).replace("│", " ")  # tyro draws boxes around what it says
    assert says in " ".join(printed.split()), printed
    assert "Traceback" not in done.stderr


def test_doctor_names_the_paths_and_why() -> None:
    done = byteback("doctor")
    assert done.returncode == 0, done.stderr
    for path in native.PATHS:
        assert path in done.stdout
    assert f"operators take the path {native.available()[0]}" in done.stdout


def test_the_bare_command_helps_and_the_version_is_told() -> None:
    assert "verify" in byteback().stdout
    assert byteback("--version").stdout.startswith("byteback 0.")


def test_verify_compares_every_native_path() -> None:
    done = byteback("verify", "--cases", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    for path in native.available():
        assert path == "reference" or f"path {path}" in done.stdout


def test_an_unknown_path_in_the_environment_is_refused() -> None:
    done = byteback("train", "--epochs", "1", "--recipe", "plain-int8", BYTEBACK_PATH="avx3")
    assert done.returncode != 0
    assert "BYTEBACK_PATH is set to 'avx3'" in done.stderr and "Traceback" not in done.stderr
