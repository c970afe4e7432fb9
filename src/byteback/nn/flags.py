# SPDX-License-Identifier: Apache-2.0
"""The flags of NaN and Inf that a backend which defers has left on its device (ops/refusals.py): one look at all of them.

The optimizer's hook reads them before the step (lr_scaling.py; with several ranks in ranks.py, where they are added up first).
Where no hook is installed the next forward does (undo.py).
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
    " This was met in the step before this forward: on this device NaN and Inf are read once per step, and without "
    "byteback.scale_learning_rates(optimizer, model) nothing reads them before the optimizer steps."
)


class Holder(NamedTuple):
    """A tensor with flags, and whose they are."""

    layer: LayerNumerics
    role: str
    unshared: Tensor

    def name(self) -> tuple[str, str]:
        """Layer and role, as errors call them."""
        return self.layer.settings["input"].layer, self.role


class Flags(NamedTuple):
    """What was read: the layers that met NaN or Inf, and the error of the first tensor that has to become one."""

    met: list[LayerNumerics]
    error: NonFiniteError | None


def numerics_of(model: nn.Module) -> list[LayerNumerics]:
    """What the int8 layers of a model remember."""
    return [module for module in model.modules() if isinstance(module, LayerNumerics)]


def any_defers(layers: Iterable[LayerNumerics]) -> bool:
    """Whether one of these layers is where a backend defers."""
    one_of_each = {layer.unshared.device: layer.unshared for layer in layers}  # every step asks: once for each device
    return any(map(defers, one_of_each.values()))


def holders(layers: Sequence[LayerNumerics]) -> list[Holder]:
    """The quantizers of all layers, then the weights of all layers."""
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
    """The same before a forward: an error, if there is one. How many tensors were met is left to the optimizer's hook."""
    held = holders(layers)
    error = first(_look(held), [holder.name() for holder in held], LATE)
    if error is not None:
        torch._foreach_zero_([holder.unshared[REFUSED:, NONFINITE] for holder in held])
    return error


def _look(held: list[Holder]) -> list[list[float]]:
    """The flags of a model, which may be spread over several devices."""
    if not held:
        return []
    device = held[0].unshared.device
    columns: list[list[float]] = torch.stack([holder.unshared.to(device) for holder in held])[..., NONFINITE].tolist()
    return columns


def changed(tensors: list[Tensor], before: list[Tensor]) -> list[bool]:
    """Which of these tensors are no longer what they were, in one look."""
    if not tensors:
        return []
    differ = [(now != then).any().to(tensors[0].device) for now, then in zip(tensors, before, strict=True)]
    found: list[bool] = torch.stack(differ).tolist()
    return found
