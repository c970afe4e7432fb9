# SPDX-License-Identifier: Apache-2.0
"""--weights: where the initial weights of a network come from, and how they fit. --freeze: which of them are not trained.

    FILE               a state dict, {"model": ...}, {"state_dict": ...}, safetensors, or best.safetensors and .pt of a run
    torchvision:NAME   the weights of torchvision with this name for the network, such as torchvision:DEFAULT
    timm               the weights of timm for the network timm:NAME

Everything must fit, except a head for another number of classes, which stays as it was initialized.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from byteback.suggestions import unknown
from byteback.torchvision_compat import load as load_torchvision
from byteback.train import compact
from byteback.train.checkpoints import checkpoint

TORCHVISION, TIMM = "torchvision:", "timm"
State = dict[str, Tensor]
_INSIDE = ("model", "state_dict", "model_state_dict")  # where checkpoints have their state dict
_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
_AUXILIARY = ("AuxLogits.", "aux1.", "aux2.", "aux_classifier.")  # heads of torchvision that only some trainings have
_LISTED = 5


def check(spec: str, model: str) -> None:
    """Raises an error if weights of this kind cannot exist for the network."""
    if spec == TIMM and not model.startswith("timm:"):
        raise ValueError(f"train: --weights timm is for networks of timm, but --model is {model}. Use timm:{model}, or a file.")
    if spec.startswith(TORCHVISION) and model.startswith("timm:"):
        raise ValueError(f"train: --weights {spec} is for networks of torchvision, but --model is {model}. Use --weights timm.")


def read(spec: str, model: str) -> State:
    """Returns the state dict that `spec` names, for the network `model`."""
    check(spec, model)
    if spec == TIMM:
        return _of_timm(model)
    if spec.startswith(TORCHVISION):
        return _of_torchvision(spec, model)
    return _clean(spec, _of_file(Path(spec)))


def fit(network: nn.Module, state: State, spec: str, classes: int) -> list[str]:
    """Loads the weights into a float network. Returns the layers that stay as they were: heads for other classes."""
    own = network.state_dict()
    left = {key for key in state.keys() - own.keys() if key.startswith(_AUXILIARY)}
    extra = sorted(state.keys() - own.keys() - left)
    missing = sorted(key for key in own.keys() - state.keys() if not key.endswith("num_batches_tracked"))
    differ = sorted(key for key in own.keys() & state.keys() if own[key].shape != state[key].shape)
    heads = [key for key in differ if _is_head(own[key], state[key], classes)]
    wrong = [f"{key} is {tuple(state[key].shape)} instead of {tuple(own[key].shape)}" for key in differ if key not in heads]
    wrong += [f"{key} is missing" for key in missing] + [f"{key} is not part of the network" for key in extra]
    if wrong:
        more = f", and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise ValueError(
            f"train: --weights {spec} does not fit {type(network).__name__}: {'; '.join(wrong[:_LISTED])}{more}. Choose the "
            "--model that these weights were trained with."
        )
    network.load_state_dict({key: value for key, value in state.items() if key in own and key not in heads}, strict=False)
    return sorted({key.rpartition(".")[0] for key in heads})


def _is_head(own: Tensor, stored: Tensor, classes: int) -> bool:
    """Whether a weight or bias predicts classes, and differs in their number only."""
    return own.dim() == stored.dim() > 0 and own.shape[1:] == stored.shape[1:] and own.shape[0] % classes == 0


def _of_file(path: Path) -> Any:
    if path.is_dir():
        path = compact.file_of(path)
    try:
        if path.suffix == ".safetensors":
            return compact.read_state(path)
        if not path.exists():
            raise FileNotFoundError
        contents = checkpoint.read(path)
    except FileNotFoundError as error:
        raise ValueError(
            f"train: --weights {path}: no such file. Give a file, torchvision:NAME, or timm for a network of timm."
        ) from error
    except ImportError:
        raise
    except Exception as error:  # zipfile, pickle, torch and safetensors raise different errors for a damaged file
        if str(error).startswith(f"{path}: "):  # one of ours
            raise ValueError(f"train: --weights {error}") from error
        reason = (str(error).strip() or repr(error)).splitlines()[0].rstrip(".")
        raise ValueError(f"train: --weights {path}: the file cannot be read as weights: {reason[:200]}.") from error
    return _tested(path, contents) if isinstance(contents, dict) and "progress" in contents else contents


def _tested(path: Path, contents: dict[str, Any]) -> Any:
    """Returns the weights that a checkpoint of ours was tested with: with --ema their average."""
    found = contents.get("format", checkpoint.FORMAT)
    if isinstance(found, int) and found > checkpoint.FORMAT:
        raise ValueError(
            f"train: --weights {path}: the checkpoint has format {found}, but this build reads {checkpoint.FORMAT}. Install a "
            "newer byteback."
        )
    return checkpoint.tested_state(contents) if isinstance(contents.get("model"), dict) else contents


def _clean(spec: str, contents: Any) -> State:
    """Returns the state dict inside the contents of a file, without wrappers and quantizers."""
    for key in _INSIDE:
        if isinstance(contents, dict) and isinstance(contents.get(key), dict):
            contents = contents[key]
            break
    tensors = isinstance(contents, dict) and {key: value for key, value in contents.items() if isinstance(value, Tensor)}
    if not tensors or not all(isinstance(key, str) for key in tensors):
        raise ValueError(f"train: --weights {spec}: there is no state dict in this file. Save model.state_dict().")
    for prefix in _WRAPPERS:
        if all(key.startswith(prefix) for key in tensors):
            tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return {key: value for key, value in tensors.items() if "quantizers." not in key}


def _of_torchvision(spec: str, model: str) -> State:
    models, name = load_torchvision().models, spec.removeprefix(TORCHVISION)
    known = models.list_models()
    if model not in known:
        raise unknown("train", "network of torchvision with weights", model, known)
    choices = models.get_model_weights(model)
    short = name.rpartition(".")[2]
    if short not in choices.__members__:
        raise unknown("train", f"weights of torchvision for {model}", name, list(choices.__members__))
    try:
        state: State = choices[short].get_state_dict(progress=False, check_hash=True)
    except Exception as error:  # urllib, sockets and torch.hub raise different errors
        raise ValueError(
            f"train: --weights {spec}: the download failed: {error}. The file is {choices[short].url}; download it elsewhere, "
            "and give its path."
        ) from error
    return state


def _of_timm(model: str) -> State:
    from byteback.train.networks import timm

    package, name = timm(), model.removeprefix("timm:")
    if package is None:
        raise ImportError(f"train: {model} needs timm, which is not installed. Install it: pip install timm", name="timm")
    try:
        state: State = package.create_model(name, pretrained=True).state_dict()
    except Exception as error:  # the hub, urllib and timm raise different errors
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ValueError(
            f"train: --weights timm: the weights of {name} could not be loaded: {reason[:200]}. Download them elsewhere, and "
            "give the path of the file."
        ) from error
    return state


# ---- --freeze --------------------------------------------------------------------------------------------------------


def freeze(network: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Stops the training of all parameters in modules that match a wildcard. Returns their norms, which stay in eval mode."""
    names = [name for name, _ in network.named_modules() if name]
    norms: list[nn.Module] = []
    for pattern in patterns:
        chosen = [name for name in names if fnmatchcase(name, pattern)]
        if not chosen:
            raise unknown("train", "layer for --freeze", pattern, names)
        for name in chosen:
            module = network.get_submodule(name)
            for parameter in module.parameters():
                parameter.requires_grad_(False)
            norms += [inner for inner in module.modules() if isinstance(inner, nn.modules.batchnorm._BatchNorm)]
    if patterns and not any(parameter.requires_grad for parameter in network.parameters()):
        raise ValueError(f"train: --freeze {' '.join(patterns)} leaves nothing to train. Freeze fewer layers.")
    return list(dict.fromkeys(norms))
