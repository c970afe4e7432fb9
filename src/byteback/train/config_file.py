# SPDX-License-Identifier: Apache-2.0
"""TOML files and the command line: flags override the file, the file overrides the default values.

`--config FILE` and `--resume RUN` (with the config.toml of the run) are read first, because their contents are the default
values for the rest of the command line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import tyro

from byteback.suggestions import unknown
from byteback.train.config import TrainConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = "config.toml"
AUTO = "auto"
_OF_A_MEMBER = "metrics.jsonl"  # the folder of a member has a config.toml, too
_NEVER_STORED = ("resume", "test_only", "config")
# What may change when a run is resumed: members may be added, and nothing else changes a number, except that float layers may
# round differently with another number of threads (the trainer prints a note).
_MAY_CHANGE = (
    *("recipe", "recipes", "seed", "workers", "data_path", "download", "output_dir", "threads"),
    *("checkpoint_seconds", "rank_timeout", "processes", "tensorboard", *_NEVER_STORED),
)
_ONLY_WRITTEN = ("log_every", "histogram_every")  # these do not change training, but the journals


def from_command_line(args: Sequence[str]) -> TrainConfig:
    """Returns the config of `byteback train ARGS`."""
    file, run = _value(args, "--config"), _value(args, "--resume")
    if run == AUTO:
        return _go_on_or_start(args, read(Path(file)) if file is not None else TrainConfig())
    if run is not None:
        if file is not None:
            raise ValueError("train: --resume uses the config.toml of the run, so --config cannot be given. Remove it.")
        stored = _of_run(run_folder(run) / NAME)
        config = tyro.cli(TrainConfig, default=stored, args=args, prog="byteback train")
        _refuse_changes(stored, config)
        if _value(args, "--output-dir") is not None:
            raise ValueError("train: --resume writes into the folder of the run, so --output-dir cannot be given. Remove it.")
        return _joined(stored, config, run_folder(run))
    default = read(Path(file)) if file is not None else TrainConfig()
    return tyro.cli(TrainConfig, default=default, args=args, prog="byteback train")


def _go_on_or_start(args: Sequence[str], default: TrainConfig) -> TrainConfig:
    """--resume auto: the same command starts a run, and continues it when it is called again."""
    asked = tyro.cli(TrainConfig, default=default, args=args, prog="byteback train")
    folder = Path(asked.output_dir) if asked.output_dir is not None else default_folder(asked)
    if not (folder / NAME).is_file():
        return dataclasses.replace(asked, resume=None, output_dir=str(folder))
    stored = _of_run(folder / NAME)
    # Both sides are complete: what was stored is, and a default value that has changed since then counts as a change.
    _refuse_changes(stored.complete(), asked.complete())
    return _joined(stored, asked.complete(), folder)


def _of_run(path: Path) -> TrainConfig:
    """Reads the config that a run has written: every value is there."""
    stored = read(path)
    if stored.model is None:
        raise ValueError(f"{path}: this file is empty or not that of a run: it names no model. Restore it.")
    return stored


def _joined(stored: TrainConfig, config: TrainConfig, folder: Path) -> TrainConfig:
    """Returns the config of the run in `folder` with the members of both: its table has all that it ever had."""
    recipe = tuple(dict.fromkeys((*stored.recipe, *config.recipe)))
    seed = tuple(dict.fromkeys((*stored.seed, *config.seed)))
    recipes = {**stored.recipes, **config.recipes}
    return dataclasses.replace(
        config,
        recipe=recipe,
        seed=seed,
        recipes=recipes,
        resume=str(folder),
        output_dir=str(folder),
        processes=stored.processes,
    )


def default_folder(config: TrainConfig) -> Path:
    """Returns the folder of a run without --output-dir.

    >>> str(default_folder(TrainConfig(data="cifar10", model="resnet20")))
    'runs/cifar10-resnet20'
    """
    data = Path(config.data.partition(":")[2] or config.data).name
    return Path("runs") / f"{data}-{config.complete().model}".replace(":", "-").replace("/", "-")


def run_folder(path: str) -> Path:
    """Returns the folder of a run, given that folder, the folder of a member, or a checkpoint."""
    folder = Path(path)
    if folder.suffix == ".pt":
        folder = folder.absolute().parent
    if (folder / _OF_A_MEMBER).is_file():
        folder = folder.absolute().parent.parent
    if not (folder / NAME).is_file():
        raise ValueError(
            f"train: --resume {path}: there is no {NAME} in {folder}, so it is not a run. Give the folder of a run."
        )
    return folder


def _value(args: Sequence[str], flag: str) -> str | None:
    """Returns the value of a flag, given as `--flag value` or `--flag=value`; None if it is not given."""
    for index, arg in enumerate(args):
        if arg == flag and index + 1 < len(args):
            return args[index + 1]
        if arg.startswith(flag + "="):
            return arg.removeprefix(flag + "=")
    return None


def _refuse_changes(stored: TrainConfig, asked: TrainConfig) -> None:
    for field in dataclasses.fields(TrainConfig):
        before, now = getattr(stored, field.name), getattr(asked, field.name)
        if field.name not in _MAY_CHANGE and before != now:
            raise ValueError(
                f"train: the run was started with {field.name} = {before!r}, and --resume continues it bit for bit, so it "
                f"cannot change to {now!r}. Remove the flag, or start a new run with another --output-dir."
            )


def settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings that the numbers of a run depend on, without the recipe and the seed."""
    left_out = (*_MAY_CHANGE, *_ONLY_WRITTEN)
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in left_out}


def read(path: Path) -> TrainConfig:
    """Reads the config from a TOML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: this is not TOML: {error}.") from error
    except OSError as error:
        raise ValueError(f"{path}: the config cannot be read: {error.strerror}. Check its name.") from error
    return parse(text, path)


def parse(text: str, path: Path) -> TrainConfig:
    """Returns the config of a TOML text; `path` is the file that it comes from."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: this is not TOML: {error}.") from error
    fields = {field.name for field in dataclasses.fields(TrainConfig)} - set(_NEVER_STORED)
    hints = get_type_hints(TrainConfig)
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name == "seeds":
            name = "seed"
        if name not in fields:
            raise unknown(str(path), "key", key, sorted(fields))
        values[name] = _typed(path, key, hints[name], value)
    try:
        return TrainConfig(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _typed(path: Path, key: str, hint: Any, value: Any) -> Any:
    """Converts a value to the type of its field. A single name or seed becomes a list of one."""
    text = str(hint)
    if text.startswith("tuple"):
        values = value if isinstance(value, list) else [value]
        kind: Any = str if "str" in text else int
        if all(type(item) is kind for item in values):
            return tuple(values)
    elif text.startswith("dict"):
        if isinstance(value, dict) and all(isinstance(table, dict) for table in value.values()):
            return value
    elif "float" in text and type(value) in (int, float):
        return float(value)
    elif type(value).__name__ in text or (isinstance(value, str) and "Literal" in text):
        if "Literal" in text and value not in hint.__args__:
            raise unknown(str(path), f"value of {key}", value, hint.__args__)
        return value
    raise ValueError(f"{path}: {key} is {value!r}, a {type(value).__name__}, but it takes {text.replace('typing.', '')}.")


def to_text(config: TrainConfig) -> str:
    """Returns the config as TOML, which `read` reads back.

    >>> "seed = [0, 1]" in to_text(TrainConfig(lr=0.05, seed=(0, 1))).splitlines()
    True
    """
    lines = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in (*_NEVER_STORED, "recipes"):
            continue
        lines.append(f"# {field.name} is not set" if value is None else f"{field.name} = {_toml(value)}")
    for name, table in config.recipes.items():
        lines += ["", f"[recipes.{_toml(name)}]", *(f"{_key(key)} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if key.isascii() and key.replace("_", "").replace("-", "").isalnum() else _toml(key)


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # Numbers, booleans and strings are the same in TOML and JSON, but TOML needs DEL escaped and has no surrogate pairs.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
