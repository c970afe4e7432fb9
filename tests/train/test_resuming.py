# SPDX-License-Identifier: Apache-2.0
"""A run goes on only as what it was begun as: the same recipe, settings and images; and a mistake shows before training."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from byteback.train import config_file, side_by_side
from byteback.train.checkpoints import checkpoint
from byteback.train.checkpoints.files import read_lines
from byteback.train.config_file import from_command_line, run_folder
from byteback.train.evaluate import EvalConfig
from byteback.train.evaluate import run as evaluate

SMALL = ("--no-tensorboard", "--histogram-every", "0", "--batch-size", "720", "--threads", "1", "--epochs", "1")


def train(*args: str) -> str:
    """`byteback train` within this process; what it prints."""
    console = Console(file=io.StringIO(), width=200)
    side_by_side.run(from_command_line(args), console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    train(*SMALL, "--recipe", "plain-int8", "unified-int8", "--output-dir", str(run))
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy in which unified-int8 has not ended."""
    shutil.copytree(finished, tmp_path / "run")
    metrics = tmp_path / "run" / "unified-int8" / "seed0" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:-1]))
    return tmp_path / "run"


def test_a_members_folder_and_its_checkpoint_name_the_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member = run / "unified-int8" / "seed0"
    assert run_folder(str(member)) == run_folder(str(member / "last.pt")) == run
    monkeypatch.chdir(member)
    assert run_folder("last.pt") == run and run_folder(".") == run


def test_a_checkpoint_of_another_recipe_is_refused(run: Path) -> None:
    shutil.copy(run / "plain-int8" / "seed0" / "last.pt", run / "unified-int8" / "seed0" / "last.pt")
    with pytest.raises(ValueError, match=r"last\.pt was started with another recipe: .*PlainInt8.*UnifiedInt8"):
        train("--resume", str(run))


def test_a_config_that_was_edited_is_refused(run: Path) -> None:
    file = run / "config.toml"
    file.write_text(file.read_text().replace("momentum = 0.9\n", "momentum = 0.8\n"))
    with pytest.raises(ValueError, match=r"was started with another momentum: 0\.9 instead of 0\.8"):
        train("--resume", str(run))


def test_other_images_are_refused(run: Path) -> None:
    path = run / "unified-int8" / "seed0" / "last.pt"
    checkpoint.save(path, {**checkpoint.load(path), "images": [1400, 360]})
    with pytest.raises(ValueError, match=r"started with another images: \[1400, 360\] instead of \[1437, 360\]"):
        train("--resume", str(run))


def test_a_member_joins_only_its_own_recipe(finished: Path, tmp_path: Path) -> None:
    """A name may stand for something else in another version, where a default has changed."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    metrics = run / "unified-int8" / "seed0" / "metrics.jsonl"
    start, *rest = read_lines(metrics)
    start["recipe_data"]["norm_memory"] = "float32"
    metrics.write_text("\n".join(json.dumps(record) for record in (start, *rest)) + "\n")
    with pytest.raises(
        ValueError, match=r"unified-int8 with seed 0 in .* was started with norm_memory = float32, but the name now"
    ):
        train("--resume", str(run), "--seeds", "1")
    assert not (run / "unified-int8" / "seed1").exists()
    train("--resume", str(run))  # nothing is left to do


def test_the_command_stays_the_first_one_and_other_threads_are_said(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = run / "summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "command": "byteback train --the-first"}))
    assert "The run was started with 1 threads" in train("--resume", str(run), "--threads", "2")
    assert json.loads(summary.read_text())["command"] == "byteback train --the-first"
    hashes = [member["state_sha256"] for member in json.loads(summary.read_text())["members"]]
    assert len(hashes) == 2 and all(hashes)


@pytest.mark.parametrize(
    ("more", "says"), [("--config", "uses the config.toml of the run"), ("--output-dir", "writes into the folder of the run")]
)
def test_what_has_no_place_beside_resume_is_refused(finished: Path, more: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        from_command_line(["--resume", str(finished), more, "elsewhere"])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--keep-float", "layr1*"), "matches none"),
        (("--data", "digits", "--image-size", "20", "--model", "vit_b_32"), "vit_b_32"),
    ],
)
def test_a_mistake_shows_before_anything_is_trained_or_written(args: tuple[str, ...], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        train(*SMALL, *args, "--recipe", "float32", "unified-int8", "--output-dir", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("flag", "says"), [("--weights", "no such file"), ("--freeze", "unknown layer for --freeze")])
def test_a_mistake_shows_early_in_float32_alone_too(flag: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        train(*SMALL, flag, "nothing", "--recipe", "float32", "--output-dir", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_config_that_a_run_did_not_write_is_refused_and_kept(run: Path) -> None:
    for text in ("", "epochs = 2\n"):
        (run / "config.toml").write_text(text)
        for args in (("--resume", str(run)), ("--resume", "auto", "--output-dir", str(run))):
            with pytest.raises(ValueError, match=r"config\.toml: this file is empty or not that of a run"):
                train(*args)
        assert (run / "config.toml").read_text() == text


def test_nothing_is_kept_float_where_none_is_asked_for(tmp_path: Path) -> None:
    train(*SMALL, "--keep-float", "none", "--recipe", "unified-int8", "--output-dir", str(tmp_path / "run"))
    assert config_file.read(tmp_path / "run" / "config.toml").keep_float == ("none",)


def test_weights_that_are_no_numbers_after_the_last_step_have_diverged(tmp_path: Path) -> None:
    args = ("--batch-size", "2000", "--lr", "1e38", "--recipe", "float32", "--output-dir", str(tmp_path / "run"))
    assert "diverged in epoch 1" in train(*SMALL, *args)


def test_eval_refuses_images_that_the_network_cannot_take(finished: Path) -> None:
    path = finished / "unified-int8" / "seed0" / "last.pt"
    console = Console(file=io.StringIO(), width=200)
    evaluate(EvalConfig(str(path)), console)
    contents = checkpoint.load(path)
    assert f"accuracy {contents['progress']['test_accuracy']:.2%}" in console.file.getvalue()  # type: ignore[attr-defined]
    for change, says in (({"image_size": 9}, "9x9 pixels"), ({"classes": 9}, "trained on 9 classes")):
        checkpoint.save(path.with_name("other.pt"), {**contents, **change})
        with pytest.raises(ValueError, match=says):
            evaluate(EvalConfig(str(path.with_name("other.pt"))), console)
    named = {"class_names": [*"abcdefghij"]}
    with pytest.raises(ValueError, match=r"was trained on 10 classes \(a, b.*\), but folder:x has 10 classes \(k, "):
        checkpoint.must_know({**contents, **named}, "folder:x", 10, [*"klmnopqrst"])
    checkpoint.must_know({**contents, **named}, "digits", 10, [])


def test_resume_auto_starts_goes_on_and_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = (*SMALL, "--recipe", "plain-int8", "--resume", "auto")
    for said in ("plain-int8 seed 0  epoch 1/1", "plain-int8 seed 0 is already finished"):
        assert said in train(*command)
    assert os.listdir("runs") == ["digits-resnet8"]
    assert "float32 seed 0  epoch 1/1" in train(*command, "--recipe", "float32")
    with pytest.raises(ValueError, match=r"started with lr = 0\.1"):
        from_command_line([*command, "--lr", "0.3"])
    file = tmp_path / "run.toml"
    file.write_text("epochs = 1\n")
    assert from_command_line(["--config", str(file), "--resume", "auto", "--output-dir", "new"]).resume is None
