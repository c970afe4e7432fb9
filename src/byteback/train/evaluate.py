# SPDX-License-Identifier: Apache-2.0
"""`byteback eval CHECKPOINT`: a checkpoint on the test images of its data set, in the arithmetic it was trained with."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from torch import Tensor

import byteback
from byteback.recipes import Recipe
from byteback.train import checkpoint, data, layout, networks
from byteback.train.detect import run as detect
from byteback.train.loop import test

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class EvalConfig:
    """Test a checkpoint of `byteback train`."""

    checkpoint: tyro.conf.Positional[str]
    """The file: a run's best.pt or last.pt."""
    data: str | None = None
    """Another data set with the same classes. Default: the one it was trained on."""
    data_path: str | None = None
    """Where the data sets lie. Default: where they lay in training, or $BYTEBACK_DATA, or ./data."""
    threads: int | None = None
    """Threads for computing. Default: as many as PyTorch chooses."""
    float32: bool = False
    """Run the weights in float32 instead of the recipe's int8."""


def run(config: EvalConfig, console: Console) -> None:
    """The command."""
    if config.threads:
        torch.set_num_threads(config.threads)
    path = Path(config.checkpoint)
    contents = checkpoint.load(path)
    accuracy, loss = evaluate(path, config.data_path, config.data, config.float32)
    how = "float32" if config.float32 else contents["variant"]
    done = checkpoint.progress_of(contents)
    console.print(f"{path}: {how}, seed {contents['seed']}, {done.epoch} epochs", highlight=False)
    what = f"mAP {accuracy:.2%}" if math.isnan(loss) else f"accuracy {accuracy:.2%}, loss {loss:.4f}"
    console.print(what, highlight=False)


def evaluate(
    path: Path,
    data_path: str | None = None,
    data_name: str | None = None,
    in_float: bool = False,
    workers: int = 2,
    download: bool = True,
) -> tuple[float, float]:
    """(accuracy, loss) of a checkpoint; (mAP, NaN) of a detector's."""
    contents = checkpoint.load(path)
    asked = tomllib.loads(contents["config"])
    if asked.get("task") == "detect":
        return detect.evaluate(contents, asked, data_name or asked["data"], in_float, workers), float("nan")
    images = data.load(
        *(data_name or asked["data"], data_path or asked.get("data_path")),
        image_size=contents["image_size"],
        workers=workers,
        download=download,
        frames=contents.get("frames", 0),
        frame_stride=asked.get("frame_stride", 1),
    )
    if images.classes != contents["classes"] or images.image_size != contents["image_size"]:
        raise ValueError(
            f"eval: {path} knows {contents['classes']} classes of {contents['image_size']}x{contents['image_size']} "
            "pixels, but "
            f"{images.name} has {images.classes} of {images.image_size}x{images.image_size}. Choose the data set it was "
            "trained on."
        )
    channels = contents["channels"]
    last = asked.get("channels_last", True)
    model = layout.lay_out(networks.build(asked["model"], images.image_size, images.classes, channels, images.frames), last)
    if contents["recipe"]:
        byteback.prepare(model, Recipe.from_dict(contents["recipe"]), keep_float=asked.get("keep_float", ()))
    model.load_state_dict(contents["model"])
    if in_float and contents["recipe"]:
        byteback.restore(model)

    def as_asked(x: Tensor) -> Tensor:
        return layout.as_asked(x, channels, last)

    return test(model, images.test, as_asked, frames=images.frames)
