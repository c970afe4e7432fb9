# SPDX-License-Identifier: Apache-2.0
"""Flags, TOML files and recipes with options: one dataclass, and near matches for every unknown name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import byteback
from byteback.train import config_file
from byteback.train.config import TrainConfig
from byteback.train.config_file import from_command_line, read, to_text
from byteback.train.variants import parse

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, 'model = "resnet8"\nlr = 0.5\nepochs = 3\nseeds = [4, 5]\nlabel-smoothing = 0\n')
    config = from_command_line(["--config", str(file), "--lr", "0.25"])
    assert (config.model, config.lr, config.epochs, config.seed, config.momentum) == ("resnet8", 0.25, 3, (4, 5), 0.9)
    assert from_command_line([f"--config={file}"]).lr == 0.5
    assert isinstance(config.label_smoothing, float)


def test_several_recipes_and_seeds_on_the_command_line() -> None:
    config = from_command_line(["--recipe", "float32", "unified-int8:period=7", "--seeds", "1", "2", "--data", "cifar10"])
    assert config.seed == (1, 2)
    assert [variant.folder for variant in config.variants()] == ["float32", "unified-int8+period=7"]
    done = config.complete()
    assert (done.model, done.epochs, done.batch_size) == ("resnet20", 15, 128)


def test_a_config_written_is_the_config_read(tmp_path: Path) -> None:
    table = {"mine": {"base": "unified-int8", "learning_rate": "none", "grad_output.clip.period": 3, "clip": {"tie": 0.5}}}
    config = TrainConfig(data="cifar10", recipe=("float32", "mine"), seed=(3,), lr=0.07, recipes=table).complete()
    assert read(write(tmp_path, to_text(config))) == config
    assert set(config_file._MAY_CHANGE) <= {field.name for field in dataclasses.fields(TrainConfig)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("epoch = 3", "unknown key 'epoch'. Did you mean epochs"),
        ('lr = "fast"', "lr is 'fast', a str, but it takes"),
        ('lr_schedule = "cosin"', "Did you mean cosine?"),
        ('recipe = ["unifed-int8"]', "Did you mean unified-int8"),
        ('recipe = ["mine"]\n[recipes.mine]\nlearning_rate = "none"', 'base = "unified-int8"'),
        ('recipe = ["mine"]\n[recipes.mine]\nbase = "plain-int8"\nnorm_memry = "int8"', "Did you mean norm_memory"),
        ("epochs = ", "this is not TOML"),
        ('resume = "runs/x"', "unknown key 'resume'"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(text: str, says: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ValueError, match=r"run\.toml") as error:
        read(file)
    assert says in str(error.value)


@pytest.mark.parametrize("name", ["täglich/😀", "a\x7fb", 'quoted "x"\\'])
def test_odd_names_and_numbers_come_back(name: str, tmp_path: Path) -> None:
    table = {name: {"base": "unified-int8", "period": 3}}
    config = TrainConfig(data_path=name, checkpoint_seconds=float("inf"), recipe=(name,), recipes=table).complete()
    assert read(write(tmp_path, to_text(config))) == config


def test_a_recipe_may_stand_on_another_one_of_the_file() -> None:
    tables = {
        "a": {"base": "unified-int8", "period": 3, "norm_memory": "float32"},
        "b": {"base": "a", "period": 5},
        "c": {"base": "d"},
        "d": {"base": "c"},
        "float32": {"base": "plain-int8"},
    }
    assert parse("b", tables).recipe == parse("unified-int8:norm_memory=float32,period=5").recipe
    with pytest.raises(ValueError, match="its own base"):
        parse("c", tables)
    with pytest.raises(ValueError, match="there is already a recipe of that name"):
        parse("float32", tables)


def test_members_join_a_resumed_run_and_none_leaves_it(tmp_path: Path) -> None:
    stored = TrainConfig(recipe=("float32", "plain-int8"), seed=(0,)).complete()
    (tmp_path / "config.toml").write_text(to_text(stored))
    config = from_command_line(["--resume", str(tmp_path), "--recipe", "unified-int8", "--seeds", "1"])
    assert config.recipe == ("float32", "plain-int8", "unified-int8") and config.seed == (0, 1)
    assert config.output_dir == str(tmp_path)
    with pytest.raises(ValueError, match=r"started with lr = 0\.1"):
        from_command_line(["--resume", str(tmp_path), "--lr", "0.2"])


def test_a_missing_file_or_run_is_named() -> None:
    with pytest.raises(ValueError, match=r"absent\.toml: the config cannot be read"):
        from_command_line(["--config", "absent.toml"])
    with pytest.raises(ValueError, match="it is not a run"):
        from_command_line(["--resume", "absent"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch_size": 1}, "BatchNorm"),
        ({"epochs": 0}, "--epochs is 0"),
        ({"lr": 0.0}, "--lr"),
        ({"seed": (1, 1)}, "each only once"),
        ({"seed": ()}, "at least one"),
        ({"seed": (-1,)}, "between 0 and"),
        ({"seed": (2**64,)}, "between 0 and"),
        ({"lr": float("inf")}, "finite"),
        ({"warmup_epochs": float("nan")}, "negative"),
        ({"data": "voc:x"}, "--task detect"),
        ({"task": "detect", "data": "frames:x"}, "--task video"),
        ({"label_smoothing": 1.0}, "[0, 1)"),
        ({"test_only": True}, "--resume RUN"),
    ],
)
def test_a_config_that_cannot_train_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as error:
        TrainConfig(**change)  # type: ignore[arg-type]
    assert says in str(error.value)


# ---- recipes with options ----


def test_ablations_are_recipes_with_options() -> None:
    unified, adaptive = byteback.UnifiedInt8(), byteback.DistributionAdaptiveInt8()
    assert parse("unified-int8").recipe == unified
    assert parse("float32").recipe is None
    without_dclrs = parse("unified-int8:learning_rate=none").recipe
    assert without_dclrs == dataclasses.replace(unified, learning_rate=None)
    without_dsgc = parse("unified-int8:grad_output.clip=MaxAbs").recipe
    assert without_dsgc is not None and without_dsgc.grad_output == byteback.TensorRule(rounding="stochastic")
    assert without_dsgc.learning_rate == unified.learning_rate
    gvq = parse("distribution-adaptive-int8:clip=MaxAbs").recipe
    assert gvq is not None and gvq.grad_output_for_weight == byteback.TensorRule(rounding="stochastic", per="K")
    mcs = parse("distribution-adaptive-int8:grad_output_for_weight=none").recipe
    assert mcs == dataclasses.replace(adaptive, grad_output_for_weight=None)
    nearest = parse("distribution-adaptive-int8:rounding=nearest").recipe
    assert nearest is not None and nearest.grad_output.rounding == nearest.grad_output_for_weight.rounding == "nearest"  # type: ignore[union-attr]
    both = parse("plain-int8:norm_memory=int8,strict=true").recipe
    assert both is not None and both.strict and both.norm_memory == "int8"


def test_a_table_of_a_file_defines_a_recipe_that_options_may_change_further() -> None:
    tables = {"slow": {"base": "unified-int8", "grad_output": {"clip": {"period": 100}}}}
    recipe = parse("slow:evaluations=5", tables).recipe
    assert recipe is not None
    assert (recipe.grad_output.clip.period, recipe.grad_output.clip.evaluations) == (100, 5)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("unified-int8:perod=3", "Did you mean period"),
        ("unified-int8:clip=Maxabs", "Did you mean MaxAbs"),
        ("unified-int8:period=often", "Use a int"),
        ("unified-int8:period=none", "cannot be none"),
        ("unified-int8:grad_output=none", "cannot be none"),
        ("unified-int8:period", "is not an option"),
        ("float32:period=3", "has no options"),
        ("plain-int8:norm_memory=int7", "choose one of float32, bfloat16, int8"),
    ],
)
def test_a_wrong_option_is_refused_with_a_hint(spec: str, says: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(spec)
    assert says in str(error.value)


# ---- the files in configs/ ----


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_reads_and_opens_with_its_command(path: Path) -> None:
    config = read(path)
    head = path.read_text().split("\n\n")[0]
    assert f"byteback train --config configs/{path.name}" in head
    assert "expect" in head.lower()
    assert config.variants()


def test_there_are_configs() -> None:
    assert len(CONFIGS) >= 5
