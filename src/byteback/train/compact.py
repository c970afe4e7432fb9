# SPDX-License-Identifier: Apache-2.0
"""best.safetensors: the weights of a trained network alone, for predictions, beside the checkpoint that training resumes from.

A weight that predictions read as int8 is stored as int8, with its clip (`weight.clip`): the largest magnitudes become the clip
again, so quantizing what is read gives the same integers and the same scale. Other weights and buffers are float32. Of the
quantizers only the clips that training has tracked are stored. The metadata has the config, the recipe, the classes and the
preprocessing as JSON, and a checksum of everything, which safetensors itself does not have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from byteback.nn import Int8Layer
from byteback.nn.layers.computed import is_weight
from byteback.nn.quantizing import fresh_weight
from byteback.ops.contract.limits import NUMERICS_VERSION, QMAX
from byteback.ops.contract.rounded_once import divided_by
from byteback.quantize import MaxAbs
from byteback.train.checkpoints import files

NAME = "best.safetensors"
FORMAT = 1
_CLIP, _KEY, _SUM = ".clip", "byteback", "sha256"
_TRACKED = ("quantizers.input.tracked", "quantizers.input.seen")


class Newer(ValueError):
    """A file was written by a newer version of byteback."""


def save(path: Path, model: nn.Module, facts: dict[str, Any]) -> None:
    """Writes the weights of a model and what is needed to build it, atomically."""
    import safetensors.torch

    tensors: dict[str, Tensor] = {}
    every = {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, Int8Layer)}
    layers = {key: layer for key, layer in every.items() if is_weight(layer)}
    for key, value in model.state_dict().items():
        layer = layers.get(key)
        if ".quantizers." in f".{key}":
            if key.endswith(_TRACKED):
                tensors[key] = value.clone()
        elif layer is not None and layer.runs_int8("output") and isinstance(layer.recipe.weight.clip, MaxAbs):
            tensors[key] = fresh_weight(layer, value).values.contiguous()
            tensors[key + _CLIP] = _clip(value, per_channel=layer.recipe.weight.per == "K")
        else:
            tensors[key] = value.detach().contiguous()
    own = {name: value.clone() for name, value in tensors.items()}  # safetensors refuses tensors that share memory
    data = json.dumps({"format": FORMAT, "numerics_version": NUMERICS_VERSION, **facts})
    files.replace(path, safetensors.torch.save(own, {_KEY: data, _SUM: _checksum(data, own), "format": "pt"}))


def _checksum(data: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(data.encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _clip(weight: Tensor, per_channel: bool) -> Tensor:
    magnitudes = weight.detach().abs()
    return magnitudes.flatten(1).amax(1) if per_channel else magnitudes.amax().reshape(1)


def facts(path: Path) -> dict[str, Any]:
    """Returns what a file says about its network. Raises an error for another file."""
    return _read(path)[0]


def read_state(path: Path) -> dict[str, Tensor]:
    """Returns the float state dict in a file of ours, with the tracked clips, or the tensors of any other safetensors."""
    return _read(path, any_file=True)[1]


def _read(path: Path, any_file: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            known = metadata.get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is no dict
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file.") from error
    except (SafetensorError, OSError, ValueError) as error:  # the last: a header that is not UTF-8
        raise ValueError(f"{path}: the file is damaged, or no safetensors: {error}.") from error
    if known is None:
        if any_file:
            return {}, tensors
        raise ValueError(f"{path}: this file was not written by byteback, so it is unknown which network its weights are for.")
    if metadata.get(_SUM) not in (None, _checksum(known, tensors)):  # files written before there was one have none
        raise ValueError(f"{path}: the file is damaged: its checksum is wrong. Copy it again, or use best.pt.")
    about: dict[str, Any] = json.loads(known)
    if about["format"] > FORMAT:
        raise Newer(
            f"{path}: the file has format {about['format']}, but this build reads up to {FORMAT}. Install a newer byteback."
        )
    return about, _floats(tensors)


def _floats(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replaces the int8 weights by floats, which are quantized to the same integers and the same scale."""
    made = {name: value for name, value in tensors.items() if not name.endswith(_CLIP)}
    for name in [name for name in tensors if name.endswith(_CLIP)]:
        weight = name.removesuffix(_CLIP)
        values = tensors[weight]
        clip = tensors[name].reshape(-1, *(1,) * (values.dim() - 1))
        floats = values.float() * divided_by(clip, QMAX)
        made[weight] = torch.where(values.abs() == QMAX, values.sign() * clip, floats)
    return made


def file_of(path: Path) -> Path:
    """Returns the file of a run or of a member, given the folder; a file is returned as it is."""
    if not path.is_dir():
        return path
    found = sorted(path.glob(NAME)) or sorted(path.glob(f"*/*/{NAME}")) or sorted(path.glob(f"*/{NAME}"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(
            f"{path}: there is no {NAME} in this folder. Give the folder of a run or of a member that has an epoch."
        )
    listed = ", ".join(str(file.parent.relative_to(path)) for file in found[:8])
    raise ValueError(f"{path}: the run has several members ({listed}). Give the folder of one, such as {found[0].parent}.")
