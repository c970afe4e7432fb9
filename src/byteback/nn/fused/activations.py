# SPDX-License-Identifier: Apache-2.0
"""How a model can write each activation that a block computes: one table, for the graph pass and for LazyConv.

`byteback.ops` has their values and derivatives. A new activation is a row here and what ops needs for it.
"""

from __future__ import annotations

from types import MethodDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from byteback import ops


class Activation(NamedTuple):
    """One row of the table. Hardtanh counts only from 0 to 6."""

    name: str  # in byteback.ops
    modules: tuple[type[nn.Module], ...]
    functions: tuple[Any, ...]  # with an argument `inplace`
    new: tuple[Any, ...] = ()  # functions and methods that return another tensor
    in_place: tuple[Any, ...] = ()  # those that write to their input


TABLE = (
    Activation("relu", (nn.ReLU,), (F.relu,), (torch.relu, Tensor.relu), (torch.relu_, Tensor.relu_)),
    Activation("relu6", (nn.ReLU6, nn.Hardtanh), (F.relu6, F.hardtanh)),
    Activation("hardswish", (nn.Hardswish,), (F.hardswish,)),
    Activation("silu", (nn.SiLU,), (F.silu,)),
)

BY_MODULE: dict[type[nn.Module], str] = {module: row.name for row in TABLE for module in row.modules}

BY_CALL: dict[Any, tuple[str, bool | None]] = {
    call: (row.name, writes)
    for row in TABLE
    for calls, writes in ((row.functions, None), (row.new, False), (row.in_place, True))
    for call in calls
}
"""The activation, and whether the call writes to its input; None: its argument `inplace` says so."""

BY_TARGET: dict[Any, str] = {
    call.__name__ if isinstance(call, MethodDescriptorType) else call: name for call, (name, _) in BY_CALL.items()
}
"""The activation by the target of a node of torch.fx, where a method is a string."""

WITH_MASK = tuple(name for name in ops.ACTIVATIONS if name != "none" and name not in ops.SMOOTH)
"""Activations whose derivative is a bit. None of them has negative values, and only they are computed after a sum."""
