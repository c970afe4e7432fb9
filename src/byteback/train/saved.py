# SPDX-License-Identifier: Apache-2.0
"""Builds a trained network from best.safetensors, from a checkpoint, or from the folder of a run: byteback.load."""

from __future__ import annotations

import dataclasses
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from byteback.ops.contract.limits import NUMERICS_VERSION
from byteback.recipes import Recipe
from byteback.train import compact, config_file, tasks
from byteback.train.checkpoints import checkpoint
from byteback.train.config import TrainConfig
from byteback.train.data import Data
from byteback.train.data.preprocess import Preprocess

PRECISIONS = ("int8", "float")
_CLIP_BATCH = 2


@dataclass(frozen=True)
class About:
    """What a loaded network knows about itself: `model.byteback`."""

    path: Path
    config: TrainConfig
    variant: str
    classes: tuple[str, ...]
    """The names of the classes in the order of the outputs; numbers if the data set has no names."""
    preprocess: Preprocess
    """Makes the input of an image or clip: preprocess(file) or preprocess.batch([file, ...])."""

    @property
    def task(self) -> str:
        """classify, video or detect."""
        return self.config.task

    @property
    def example(self) -> Tensor:
        """An input of zeros; of a detector a square image."""
        own = self.preprocess
        if self.task == "detect":
            return torch.zeros(own.network_channels or own.channels, own.size, own.size)
        sides = (own.size, own.size)
        return torch.zeros(_CLIP_BATCH, own.network_channels, *((own.frames, *sides) if own.frames else sides))

    def as_data(self) -> dict[str, Any]:
        """Returns what an exported file should know, as plain data."""
        return {
            **{"task": self.task, "model": self.config.model, "data": self.config.data, "recipe": self.variant},
            **{"classes": list(self.classes), "preprocess": self.preprocess.as_data()},
        }


def load(path: str | os.PathLike[str], precision: str = "int8") -> nn.Module:
    """Returns the network in eval mode."""
    if precision not in PRECISIONS:
        raise ValueError(f"load: precision is {precision!r}; choose one of {', '.join(PRECISIONS)}.")
    file = _file(Path(path))
    if file.suffix == ".pt":
        contents = checkpoint.load(file)
        state = checkpoint.tested_state(contents)
    else:
        contents, state = compact.facts(file), compact.read_state(file)
        _same_numerics(file, contents.get("numerics_version"))
    config = config_file.parse(contents["config"], file).complete()
    recipe = Recipe.from_dict(contents["recipe"]) if contents["recipe"] and precision == "int8" else None
    random = torch.get_rng_state()
    model = tasks.build(config, recipe, _like(config, contents), begun=True)
    torch.set_rng_state(random)
    _fill(model, state, file)
    about = About(file, config, contents["variant"], _classes(contents), _preprocess(file, contents))
    model.byteback = about  # type: ignore[assignment]
    return model.eval()


def _file(path: Path) -> Path:
    """Returns the file to read."""
    found = compact.file_of(path)
    if not found.is_file():
        raise ValueError(f"load: there is no file {found}. Give {compact.NAME}, a checkpoint, or the folder of a run.")
    if found.suffix not in (".pt", ".safetensors"):
        raise ValueError(f"load: {found} is neither {compact.NAME} nor a checkpoint of a run.")
    return found


def _same_numerics(file: Path, found: Any) -> None:
    """Warns if the integers of predictions may be others than those of training. The state of a checkpoint says so itself."""
    if found != NUMERICS_VERSION:
        warnings.warn(
            f"{file}: the file has numerics version {found}, but this build has {NUMERICS_VERSION}; predictions may "
            "differ from those of training by a rounding.",
            stacklevel=3,
        )


def _like(config: TrainConfig, contents: dict[str, Any]) -> Data:
    """Returns a data set without images that has the sizes of the one that the network was trained on."""
    nothing: Any = ()
    sizes = (contents["classes"], contents["image_size"], 3 if config.task == "detect" else contents["channels"])
    return Data(config.data, *sizes, nothing, nothing, contents.get("frames", 0), tuple(contents.get("class_names") or ()))


def _fill(model: nn.Module, state: dict[str, Tensor], file: Path) -> None:
    """Loads the state. Of quantizers a file of weights has only the tracked clips."""
    own = model.state_dict()
    used = {key: value for key, value in state.items() if key in own or "quantizers." not in key}
    absent = [key for key in own if key not in used and "quantizers." not in key]
    try:
        if absent:
            raise RuntimeError(f"{absent[0]} is missing")
        model.load_state_dict({**{key: value for key, value in own.items() if "quantizers." in key}, **used})
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ValueError(f"{file}: the weights do not fit the network that its config describes: {reason}") from error


def _classes(contents: dict[str, Any]) -> tuple[str, ...]:
    names = contents.get("class_names")
    return tuple(names) if names else tuple(str(number) for number in range(contents["classes"]))


def _preprocess(file: Path, contents: dict[str, Any]) -> Preprocess:
    if not contents.get("preprocess"):
        channels = contents["channels"]
        if contents.get("frames"):
            return Preprocess("none", contents["image_size"], channels, frames=contents["frames"], network_channels=channels)
        return Preprocess("none", contents["image_size"], channels, network_channels=channels)
    return dataclasses.replace(Preprocess.from_data(contents["preprocess"]), network_channels=contents["channels"])
