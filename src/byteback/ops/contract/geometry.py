# SPDX-License-Identifier: Apache-2.0
"""Checks the integer arguments of operators: stride, padding, dilation, groups, sizes, an axis.

As in PyTorch, one integer means the same for all axes, integers of other libraries such as numpy are accepted, and bool and
float are not. The results are plain integers: plans are cached by these values, and 1.0 or True would be equal to 1. Signs,
lengths and whether the values fit together are checked with the plan.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

Axes = int | Sequence[int]

MOST = 2**31 - 1
"""The largest number that is accepted; no tensor that fits into memory needs a larger one."""


def geometry(op: str, spatial: int, values: Sequence[Any]) -> tuple[Any, ...]:
    """Returns stride, padding, dilation and groups of a convolution with this number of spatial axes, checked.

    >>> geometry("conv_int8", 2, (1, [0, 2], (1, 1), 1))
    ((1, 1), [0, 2], (1, 1), 1)
    """
    if len(values) != 4:
        raise ValueError(f"{op}: geometry has {len(values)} entries, but must be (stride, padding, dilation, groups).")
    stride, padding, dilation, groups = values
    if _is_plain((stride, padding, dilation, (groups,))):
        return stride, padding, dilation, groups
    return (
        axes(op, "stride", stride, spatial),
        axes(op, "padding", padding, spatial),
        axes(op, "dilation", dilation, spatial),
        whole(op, "groups", groups),
    )


def _is_plain(sequences: tuple[Any, ...]) -> bool:
    """Whether all values are plain integers in range. A fast check for the usual case."""
    for values in sequences:
        if type(values) is not tuple and type(values) is not list:
            return False
        for value in values:
            if type(value) is not int or not -MOST <= value <= MOST:
                return False
    return True


def axes(op: str, name: str, values: Axes, spatial: int) -> Sequence[int]:
    """Returns one number for each spatial axis."""
    return sizes(op, name, values) if isinstance(values, (list, tuple)) else (whole(op, name, values),) * spatial


def sizes(op: str, name: str, values: Sequence[int]) -> Sequence[int]:
    """Returns a sequence of numbers, such as the size of a tensor, checked."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{op}: {name} is {values!r}, but it must be the size of a tensor. Pass a sequence of integers.")
    return values if _is_plain((values,)) else [whole(op, name, each) for each in values]


def whole(op: str, name: str, value: Any) -> Any:
    """Returns one number, checked: an int, or a SymInt while torch.compile traces.

    >>> whole("absmax", "axis", 1.0)
    Traceback (most recent call last):
    TypeError: absmax: axis is 1.0, a float, ...
    """
    if type(value) is int or isinstance(value, torch.SymInt):
        number = value
    else:
        try:
            if isinstance(value, bool):
                raise TypeError
            number = operator.index(value)
        except TypeError:
            raise TypeError(
                f"{op}: {name} is {value!r}, a {type(value).__name__}, but it counts pixels, channels or axes. Pass an integer."
            ) from None
    if isinstance(number, int) and not -MOST <= number <= MOST:
        raise ValueError(
            f"{op}: {name} is {number}, but must be at most {MOST}; no image has more pixels along an axis. "
            "Pass a smaller number."
        )
    return number
