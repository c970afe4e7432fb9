# SPDX-License-Identifier: Apache-2.0
"""Reads the NaN and Inf flags of all layers at once, from backends that defer errors (ops/refusals.py).

The optimizer's hook reads them before the step (lr_scaling.py). With several ranks, ranks.py adds them up first. Without a
hook, the next forward reads them (undo.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from byteback.nn.layers.numerics import LayerNumerics
from byteback.ops.quantizer import defers
from byteback.ops.refusals import MET, REFUSED, first
from byteback.quantize import NONFINITE, NonFiniteError, Quantizer

LATE = (
    " This happened in the step before this forward. On this device NaN and Inf are checked once per step; to check before "
    "the optimizer steps, call byteback.scale_learning_rates(optimizer, model)."
)


class Holder(NamedTuple):
    """A tensor with flags, and the layer and the role that it belongs to."""

    layer: LayerNumerics
    role: str
    unshared: Tensor

    def name(self) -> tuple[str, str]:
        """Returns layer and role as they are written in errors."""
        return self.layer.settings["input"].layer, self.role


class Flags(NamedTuple):
    """The layers that had NaN or Inf, and the error of the first tensor that must raise one."""

    met: list[LayerNumerics]
    error: NonFiniteError | None


def numerics_of(model: nn.Module) -> list[LayerNumerics]:
    """Returns the state of the int8 layers of a model."""
    return [module for module in model.modules() if isinstance(module, LayerNumerics)]


def any_defers(layers: Iterable[LayerNumerics]) -> bool:
    """Whether one of these layers is on a device whose backend defers errors."""
    one_of_each = {layer.unshared.device: layer.unshared for layer in layers}  # called in every step: once per device
    return any(map(defers, one_of_each.values()))


def holders(layers: Sequence[LayerNumerics]) -> list[Holder]:
    """Returns the flags of the quantizers of all layers, then those of the weights of all layers."""
    quantizers = [
        Holder(layer, layer.settings[name].role, child.unshared)
        for layer in layers
        for name, child in layer._modules.items()
        if isinstance(child, Quantizer)
    ]
    return quantizers + [Holder(layer, "weight", layer.unshared) for layer in layers]


@torch.no_grad()
def read(layers: Sequence[LayerNumerics]) -> Flags:
    """Reads and clears the flags of all layers."""
    held = holders(layers)
    columns = _look(held)
    if any(map(any, columns)):
        torch._foreach_zero_([holder.unshared[:, NONFINITE] for holder in held])
    met = [holder.layer for holder, column in zip(held, columns, strict=True) if column[MET]]
    return Flags(met, first(columns, [holder.name() for holder in held]))


@torch.no_grad()
def read_errors(layers: Sequence[LayerNumerics]) -> NonFiniteError | None:
    """Same before a forward: returns an error, if there is one. Keeps the counts for the optimizer's hook."""
    held = holders(layers)
    error = first(_look(held), [holder.name() for holder in held], LATE)
    if error is not None:
        torch._foreach_zero_([holder.unshared[REFUSED:, NONFINITE] for holder in held])
    return error


def _look(held: list[Holder]) -> list[list[float]]:
    """Returns the flags of a model, which may be on several devices."""
    if not held:
        return []
    device = held[0].unshared.device
    columns: list[list[float]] = torch.stack([holder.unshared.to(device) for holder in held])[..., NONFINITE].tolist()
    return columns


def changed(tensors: list[Tensor], before: list[Tensor]) -> list[bool]:
    """Returns which tensors differ from `before`, with one synchronization."""
    if not tensors:
        return []
    differ = [(now != then).any().to(tensors[0].device) for now, then in zip(tensors, before, strict=True)]
    found: list[bool] = torch.stack(differ).tolist()
    return found
