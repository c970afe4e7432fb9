# SPDX-License-Identifier: Apache-2.0
"""Names, flags and paths that cannot work, or that only look so."""

from __future__ import annotations

import io
import sys
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from byteback import cli
from byteback.train import config_file
from byteback.train.config import TrainConfig
from byteback.train.variants import Variant, parse
from small_runs import SMALL, picture_folder, train


def test_every_recipe_has_a_folder_of_its_own_within_the_run() -> None:
    names = ["a/b", "a_b", "..", ".", "a+b", "a:b=1", "a:b=1,c=2", "a:b=1+c=2", "a%2Fb", "a\\b", "...", "a,b"]
    names += ["config.toml", "summary.json", "report.html"]  # files of a run
    folders = [Variant(name, None).folder for name in names]
    assert len(set(folders)) == len(names)
    for folder in folders:
        assert (Path("run") / folder).resolve().parent == Path("run").resolve() and not folder.startswith(".")
        assert folder not in ("config.toml", "summary.json", "report.html")
    for name in ("", "x" * 300):
        with pytest.raises(ValueError, match=r"Choose a name of 1 to"):
            parse(name, {name: {"base": "plain-int8"}})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"threads": 100_000}, "--threads is 100000; it must be between 1 and"),
        ({"momentum": 1.5}, "--momentum is 1.5; it must be less than 1"),
        ({"lr_gamma": -0.5}, "--lr-gamma is -0.5; it must be positive"),
        ({"warmup_epochs": 3.0, "epochs": 2}, "--warmup-epochs is 3, but the training has 2"),
        ({"output_dir": ""}, "--output-dir is empty"),
        ({"resume": ""}, "--resume is empty"),
        ({"data": ""}, "--data is empty"),
        ({"weights": ""}, "--weights is empty"),
        ({"task": "detect", "data": "voc:x", "backbone_checkpoint": ""}, "--backbone-checkpoint is empty"),
    ],
)
def test_values_that_cannot_train_are_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as error:
        TrainConfig(**change).complete()  # type: ignore[arg-type]
    assert says in str(error.value)


def test_a_path_with_brackets_is_printed_and_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """rich would take [/x] for the end of a style, and raise."""
    monkeypatch.chdir(tmp_path)
    args = ("train", *SMALL, "--epochs", "1", "--recipe", "float32", "--output-dir", "a[b][/x]")
    monkeypatch.setattr(sys, "argv", ["byteback", *args])
    with monkeypatch.context() as patch, warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)  # main writes its own
        cli.main()
    assert ended.value.code == 0 and "in a[b][/x]" in capsys.readouterr().out
    path = tmp_path / "a[b][" / "x]" / "float32" / "seed0" / "last.pt"
    from byteback.train.evaluate import EvalConfig
    from byteback.train.evaluate import run as evaluate

    with pytest.raises(ValueError, match=r"eval: .* was trained for --task classify, which does not work with --data voc:/x"):
        evaluate(EvalConfig(str(path), data="voc:/x"), Console(file=io.StringIO()))


def test_eval_on_other_data_takes_all_of_it(tmp_path: Path) -> None:
    contents = {"train_images": 1000, "data": "digits"}
    config = TrainConfig(**contents)  # type: ignore[arg-type]
    begun = config_file.parse(config_file.to_text(config.complete()), Path("x"))
    assert begun.train_images == 1000
    run = tmp_path / "run"
    train(*SMALL, "--epochs", "1", "--recipe", "float32", "--train-images", "800", "--output-dir", str(run))
    from byteback.train.evaluate import EvalConfig
    from byteback.train.evaluate import run as evaluate

    console = Console(file=io.StringIO())
    folder = picture_folder(tmp_path / "pictures")
    with pytest.raises(ValueError, match=r"^eval: .*was trained on 10 classes, but folder:.* has 2 classes"):
        evaluate(EvalConfig(str(run / "float32" / "seed0" / "last.pt"), data=f"folder:{folder}"), console)
