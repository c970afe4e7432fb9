# SPDX-License-Identifier: Apache-2.0
"""The real command, run as a user runs it: what it prints, and how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from byteback.inspect.machine import why_no_bf16
from byteback.ops.backends import paths


def byteback(*args: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "byteback", *args],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "160", **environment},
    )


def test_train_compares_float_with_a_recipe_on_embedded_data(tmp_path: Path) -> None:
    done = byteback("train", "--epochs", "1", "--recipe", "float32", "unified-int8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("Same seeds, same data order")[1]
    assert "float32" in table and "unified-int8" in table and "accuracy" in table and "runs/digits-resnet8" in table
    page = tmp_path / "runs/digits-resnet8/report.html"
    assert "Its report page is runs/digits-resnet8/report.html" in table and "<!doctype html>" in page.read_text()[:20]
    again = byteback("report", "runs/digits-resnet8", "--output", "x.html", cwd=tmp_path)
    assert again.returncode == 0 and (tmp_path / "x.html").read_text() == page.read_text(), again.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        pytest.param(["train", "--recipe", "unifed-int8"], "Did you mean unified-int8", id="misspelt recipe"),
        pytest.param(["train", "--epochs", "0"], "--epochs is 0; it must be at least 1", id="no epoch"),
        pytest.param(["train", "--data", "cifar"], "Did you mean cifar10", id="misspelt data set"),
        pytest.param(["train", "--data", "cifar10", "--data-path", "no", "--no-download"], "data_batch_1", id="no data"),
        pytest.param(["train", "--epoch", "1"], "--epochs", id="misspelt flag"),
        pytest.param(["report", "absent"], "there is no folder absent", id="missing run"),
        pytest.param(["report"], "give the folder of a run", id="no run to report on"),
        pytest.param(["eval", "absent.pt"], "no such checkpoint", id="missing checkpoint"),
        pytest.param(["train", "--model", "resnet21"], "resnet20", id="misspelt model"),
        pytest.param(["train", "--lr", "fast"], "lr", id="word for a number"),
        pytest.param(["bench", "kernels", "--shapes", "resnet19"], "resnet18", id="misspelt network"),
        pytest.param(["bench", "kernels", "--shapes", "absent.csv"], "absent.csv", id="missing file"),
        pytest.param(["bench"], "kernels, step", id="nothing to measure"),
        pytest.param(["bench", "step", "--model", "resnt18"], "Did you mean resnet18", id="misspelt model to measure"),
        pytest.param(["bench", "step", "--batch", "1"], "at least 2 images", id="a single image"),
        pytest.param(["bench", "step", "--image-size", "16"], "only the small ResNets", id="image too small"),
        pytest.param(["bench", "step", "--recipe", "unified"], "unified-int8", id="misspelt recipe to measure"),
        pytest.param(["bench", "step", "--json", "absent/x.json"], "no folder absent", id="missing folder"),
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
    for path in paths.PATHS:
        assert path in done.stdout
    assert "digits" in done.stdout and "cifar10" in done.stdout
    assert f"operators use the path {paths.available()[0]}" in done.stdout
    if paths.available()[0].startswith("avx"):
        assert "measured on registers" in done.stdout and "vpmaddubsw ymm" in done.stdout


def test_the_bare_command_helps_and_the_version_is_told() -> None:
    assert "verify" in byteback().stdout
    assert byteback("--version").stdout.startswith("byteback 0.")


def test_recipes_and_models_are_listed() -> None:
    recipes = byteback("recipes").stdout
    for said in ("float32", "plain-int8", "distribution-adaptive-int8", "grad_output.clip.period"):
        assert said in recipes
    models = byteback("models").stdout
    for said in ("resnet56", "853,018", "mobilenet_v2", "efficientnet_b0", "timm:NAME"):
        assert said in models


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "byteback", "train", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout and running.stderr
        running.stdout.close()
        assert running.stderr.read() == b""


def test_verify_compares_every_native_path() -> None:
    done = byteback("verify", "--cases", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    for path in paths.available():
        assert path == "reference" or f"path {path}" in done.stdout


def test_an_unknown_path_in_the_environment_is_refused(tmp_path: Path) -> None:
    done = byteback("train", "--epochs", "1", "--recipe", "plain-int8", cwd=tmp_path, BYTEBACK_PATH="avx3")
    assert done.returncode != 0
    assert "BYTEBACK_PATH is set to 'avx3'" in done.stderr and "Traceback" not in done.stderr


def test_bench_step_measures_both_sides_and_writes_its_figures(tmp_path: Path) -> None:
    figures = tmp_path / "step.json"
    sizes = ("--model", "resnet8", "--image-size", "16", "--batch", "4", "--rounds", "1")
    done = byteback("bench", "step", *sizes, "--explain", "--json", str(figures))
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("tuned by byteback.tune_malloc", "saved for backward", "byteback::conv_int8", "first losses"):
        assert said in done.stdout
    result = json.loads(figures.read_text())
    assert (result["model"], result["image_size"], result["batch"]) == ("resnet8", 16, 4)
    for name in ("ratio", "ratio_tuned_malloc", "fp32_ms", "int8_ms", "saved_ratio", "peak_ratio"):
        assert result[name] > 0, name
    has_bf16 = not why_no_bf16()
    for name in ("bf16_ms", "ratio_bf16", "ratio_bf16_tuned_malloc"):
        assert result[name] > 0 if has_bf16 else result[name] is None, name
    for side in ("fp32_ms", "bf16_ms", "int8_ms") if has_bf16 else ("fp32_ms", "int8_ms"):
        parts = {name: part[side] for name, part in result["parts"].items()}
        phases = [parts[phase] for phase in ("data", "forward", "backward", "optimizer")]
        assert sum(phases) == pytest.approx(result[side], abs=0.01)
        kinds = [ms for name, ms in parts.items() if name.startswith("backward: ")]
        assert sum(kinds) == pytest.approx(parts["backward"], abs=0.01)
    assert result["parts"]["forward: quantize"]["int8_ms"] > 0 == result["parts"]["forward: quantize"]["fp32_ms"]
    assert result["loss_difference_fp32"] < 0.1
