# SPDX-License-Identifier: Apache-2.0
"""A table of the ways to write each activation in a model. The graph pass and LazyConv use it.

`byteback.ops` has the values and derivatives. To add an activation, add a row here and what `byteback.ops` needs for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from byteback import ops


class Activation(NamedTuple):
    """One row of the table. OPTIONS lists the arguments that a call or a module must have."""

    name: str  # in byteback.ops
    modules: tuple[type[nn.Module], ...]
    functions: tuple[Any, ...]  # with an argument `inplace`
    new: tuple[Any, ...] = ()  # functions and methods that return a new tensor
    in_place: tuple[Any, ...] = ()  # those that write to their input


TABLE = (
    Activation("relu", (nn.ReLU,), (F.relu,), (torch.relu, Tensor.relu), (torch.relu_, Tensor.relu_)),
    Activation("relu6", (nn.ReLU6, nn.Hardtanh), (F.relu6, F.hardtanh)),
    Activation("hardswish", (nn.Hardswish,), (F.hardswish,)),
    Activation("silu", (nn.SiLU,), (F.silu,)),
    Activation("gelu", (nn.GELU,), (), (F.gelu,)),
)


class Option(NamedTuple):
    """An argument of a function, and the attribute of its module. The value must be `needed` to match the activation."""

    name: str
    default: object
    needed: object


_ZERO_TO_SIX = (Option("min_val", -1.0, 0.0), Option("max_val", 1.0, 6.0))
_EXACT = (Option("approximate", "none", "none"),)

OPTIONS: dict[Any, tuple[Option, ...]] = {
    **dict.fromkeys((nn.Hardtanh, F.hardtanh), _ZERO_TO_SIX),
    **dict.fromkeys((nn.GELU, F.gelu), _EXACT),
}
"""The options of a module or a function, in the order of its arguments after the input."""


def misfit_of_call(call: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Returns the argument whose value does not match the activation of the row, such as "approximate='tanh'", or None.

    >>> misfit_of_call(F.hardtanh, (0.0, 5.0), {}), misfit_of_call(F.gelu, (), {}), misfit_of_call(F.relu, (True,), {})
    ('max_val=5.0', None, None)
    """
    options = OPTIONS.get(call, ())
    return _misfit(options, {**dict(zip((option.name for option in options), args, strict=False)), **kwargs})


def misfit_of_module(base: type[nn.Module], module: nn.Module) -> str | None:
    """Same as `misfit_of_call`, for a module whose class is `base` or derived from it."""
    return _misfit(OPTIONS.get(base, ()), vars(module))


def _misfit(options: tuple[Option, ...], given: Mapping[str, Any]) -> str | None:
    for name, default, needed in options:
        value = given.get(name, default)
        if value != needed:
            return f"{name}={value!r}"
    return None


BY_MODULE: dict[type[nn.Module], str] = {module: row.name for row in TABLE for module in row.modules}

BY_CALL: dict[Any, tuple[str, bool | None]] = {
    call: (row.name, writes)
    for row in TABLE
    for calls, writes in ((row.functions, None), (row.new, False), (row.in_place, True))
    for call in calls
}
"""The activation of a call, and whether the call writes to its input. None: this depends on the argument `inplace`."""

BY_TARGET: dict[Any, str] = {
    call.__name__ if isinstance(call, MethodDescriptorType) else call: name for call, (name, _) in BY_CALL.items()
}
"""The activation of a torch.fx node by its target. The target of a method is a string."""

WITH_MASK = tuple(name for name in ops.ACTIVATIONS if name != "none" and name not in ops.SMOOTH)
"""Activations whose derivative is 0 or 1. They have no negative values, and only they are computed after a residual add."""
