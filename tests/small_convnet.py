# SPDX-License-Identifier: Apache-2.0
"""A small network to prepare, and what prepare made of its layers: for the tests of convert/."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import byteback

RECIPES = ["plain-int8", "unified-int8", "distribution-adaptive-int8"]


def small() -> nn.Sequential:
    """Convolutions 0, 2 and 4, then a Linear."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 4, 1),
        nn.Flatten(),
        nn.Linear(4 * 6 * 6, 5),
    )


def images() -> Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(7))


def kinds(model: nn.Module) -> dict[str, str]:
    wanted = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.ConvTranspose2d)
    return {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, wanted)}


def notes(model: nn.Module) -> dict[str, str]:
    return {row.name: row.note for row in byteback.summary(model)}


def anatomy(model: nn.Module) -> dict[str, Any]:
    """Everything restore must bring back: types, attributes, hooks and keys."""
    found: dict[str, Any] = {"state": list(model.state_dict())}
    for name, module in model.named_modules():
        hooks = {key: list(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        children, buffers = list(module._modules), list(module._buffers)
        found[f"module {name}"] = (type(module), sorted(vars(module)), hooks, children, buffers)
    return found
