# SPDX-License-Identifier: Apache-2.0
"""--optimizer: the optimizers of torch.optim by their names in lower case. --ema: the average of the weights over the steps."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from byteback.suggestions import unknown

_OTHERWISE = ("Optimizer", "LBFGS", "SparseAdam", "Muon")  # they need closures, sparse gradients, or matrices only
ADAPTIVE_RATE = 1e-3
"""The default learning rate of optimizers without momentum, as in PyTorch's Adam."""


def names() -> list[str]:
    """Returns the names for --optimizer."""
    kinds = {name: kind for name, kind in vars(torch.optim).items() if inspect.isclass(kind) and name not in _OTHERWISE}
    return sorted(name.lower() for name, kind in kinds.items() if issubclass(kind, torch.optim.Optimizer))


def _class(name: str) -> type[Any]:
    if name not in names():
        raise unknown("train", "optimizer", name, names())
    found: type[Any] = next(kind for own, kind in vars(torch.optim).items() if own.lower() == name and inspect.isclass(kind))
    return found


def default_rate(name: str, rate: float) -> float:
    """Returns the default learning rate of an optimizer; `rate` is that of SGD."""
    return rate if name == "sgd" else ADAPTIVE_RATE


def build(
    name: str, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Builds an optimizer. Momentum is given to those that have it."""
    kind = _class(name)
    options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    if "momentum" in inspect.signature(kind).parameters:
        options["momentum"] = momentum
    made: torch.optim.Optimizer = kind(list(parameters), **options)
    return made


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """Returns a copy of the model whose parameters follow those of the model; its buffers are the same."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
