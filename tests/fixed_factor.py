# SPDX-License-Identifier: Apache-2.0
"""A network whose learning-rate rule returns a fixed factor φ, and optimizers: for the tests of lr_scaling.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import byteback

PHI = 0.3


@dataclass(frozen=True)
class Fixed(byteback.LearningRateRule):
    phi: float = PHI

    def factor(self, deviation: float) -> float:
        return self.phi


def network(phi: float | None = PHI, **recipe: Any) -> nn.Sequential:
    """Convolutions 1 and 2 are int8, 0 stays float."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1))
    rule = None if phi is None else Fixed(phi)
    return byteback.prepare(model, byteback.UnifiedInt8(learning_rate=rule, **recipe))


def gradients(model: nn.Module, seed: int = 0) -> None:
    """One backward pass, which also gives every int8 layer a deviation; then gradients that do not depend on noise."""
    draw = torch.Generator().manual_seed(seed)
    model(torch.randn(2, 2, 6, 6, generator=draw)).square().sum().backward()
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def shortened(before: Tensor, after: Tensor, phi: float) -> Tensor:
    return before + phi * (after - before)


def stepped_back(before: Tensor, after: Tensor, phi: float, direction: Tensor, lr: float) -> Tensor:
    """The same for SGD with momentum, where after = before - lr · direction: without `before`."""
    made = torch.add(after, direction, alpha=(1.0 - phi) * lr)
    assert torch.allclose(made, shortened(before, after, phi), rtol=1e-6, atol=1e-7)
    return made


def is_scaled(name: str) -> bool:
    return name in ("1.weight", "2.weight")


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd-momentum-decay-nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05, nesterov=True),
    "sgd-momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.05, maximize=True),
    "sgd-foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05, foreach=True),
    "sgd-fused": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05, fused=True),
    "adam": lambda p: Adam(p, lr=0.01, weight_decay=0.05),
    "adam-foreach": lambda p: Adam(p, lr=0.01, foreach=True),
    "adam-fused": lambda p: Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw-foreach": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw-fused": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
}
