# SPDX-License-Identifier: Apache-2.0
"""`byteback eval CHECKPOINT`: evaluates a checkpoint on the test images of its data set, in int8 as it was trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console

import byteback
from byteback.recipes import Recipe
from byteback.train import config_file, tasks
from byteback.train.checkpoints import checkpoint
from byteback.train.config import TrainConfig, check_threads
from byteback.train.data import Data


@dataclass(frozen=True)
class EvalConfig:
    """Evaluate a checkpoint of `byteback train` on the test images."""

    checkpoint: tyro.conf.Positional[str]
    """The file: best.pt or last.pt of a run."""
    data: str | None = None
    """Another data set with the same classes. Default: the one it was trained on."""
    data_path: str | None = None
    """Folder of the data sets. Default: the same as in training, or $BYTEBACK_DATA, or ./data."""
    threads: int | None = None
    """Number of CPU threads. Default: chosen by PyTorch."""
    float32: bool = False
    """Run in float32 instead of in int8."""


def run(config: EvalConfig, console: Console) -> None:
    """Runs the command."""
    check_threads("eval", config.threads)
    if config.threads:
        torch.set_num_threads(config.threads)
    path = Path(config.checkpoint)
    contents = checkpoint.load(path)
    begun = trained_with(path, contents)
    try:
        asked = replace(begun, data=config.data or begun.data, data_path=config.data_path or begun.data_path, augment=False)
        asked = replace(asked, train_images=None)
    except ValueError as error:
        raise ValueError(
            f"eval: {path} was trained for --task {begun.task}, which does not work with --data {config.data}. Choose a "
            f"data set of the same kind as {begun.data}."
        ) from error
    tested = evaluate(asked, contents, tasks.load(asked), config.float32)
    how = "float32" if config.float32 else contents["variant"]
    done = checkpoint.progress_of(contents)
    console.print(f"{path}: {how}, seed {contents['seed']}, {done.epoch} epochs", highlight=False)
    console.print(tested, highlight=False)


def trained_with(path: Path, contents: dict[str, Any]) -> TrainConfig:
    """Returns the config of the run that a checkpoint belongs to."""
    return config_file.parse(contents["config"], path).complete()


def evaluate(config: TrainConfig, contents: dict[str, Any], images: Data, in_float: bool = False) -> str:
    """Evaluates a checkpoint on the test images. Returns the scores as text."""
    checkpoint.must_know(contents, images.name, images.classes, images.names)
    shape, known = (images.image_size, images.channels), (contents["image_size"], contents["channels"])
    if shape[0] != known[0] or shape[1] not in (1, known[1]):  # one channel is repeated
        raise ValueError(
            f"eval: the checkpoint was trained on images of {known[0]}x{known[0]} pixels with {known[1]} channels, but "
            f"{images.name} has {shape[0]}x{shape[0]} with {shape[1]}. Choose the data set it was trained on."
        )
    recipe = Recipe.from_dict(contents["recipe"]) if contents["recipe"] else None
    model = tasks.build(config, recipe, images, begun=True)
    model.load_state_dict(checkpoint.tested_state(contents))
    if in_float and recipe:
        byteback.restore(model)
    return tasks.tested(config, model, images, contents["channels"])
