# SPDX-License-Identifier: Apache-2.0
"""The whole numbers that a caller gives: stride, padding, dilation, groups, sizes, an axis.

They mean what they mean in PyTorch: one integer stands for all axes, integers of other libraries (numpy's) are integers, and
bool and float are not. What is right is returned as plain integers, so that a remembered plan, which is found by equality,
does not take 1.0 or True for 1. Their signs, their number and how they fit each other are checked with the plan.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

Axes = int | Sequence[int]

MOST = 2**31 - 1
"""The largest of these numbers that is taken; no tensor that fits into memory has an axis that needs a larger one."""


def geometry(op: str, spatial: int, values: Sequence[Any]) -> tuple[Any, ...]:
    """stride, padding, dilation and groups of a convolution with so many spatial axes.

    >>> geometry("conv_int8", 2, (1, [0, 2], (1, 1), 1))
    ((1, 1), [0, 2], (1, 1), 1)
    """
    if len(values) != 4:
        raise ValueError(f"{op}: geometry has {len(values)} entries; it is (stride, padding, dilation, groups). Pass these.")
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
    """Whether all of it is as it should be: what nearly every call gives, in as little time as possible."""
    for values in sequences:
        if type(values) is not tuple and type(values) is not list:
            return False
        for value in values:
            if type(value) is not int or not -MOST <= value <= MOST:
                return False
    return True


def axes(op: str, name: str, values: Axes, spatial: int) -> Sequence[int]:
    """One number for each spatial axis."""
    return sizes(op, name, values) if isinstance(values, (list, tuple)) else (whole(op, name, values),) * spatial


def sizes(op: str, name: str, values: Sequence[int]) -> Sequence[int]:
    """A sequence of numbers, such as the size of a tensor."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{op}: {name} is {values!r}, but it is the size of a tensor. Pass a sequence of integers.")
    return values if _is_plain((values,)) else [whole(op, name, each) for each in values]


def whole(op: str, name: str, value: Any) -> Any:
    """One number, an int or, while torch.compile traces, a SymInt.

    >>> whole("absmax", "axis", 1.0)
    Traceback (most recent call last):
    TypeError: absmax: axis has the value 1.0, a float, ...
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
                f"{op}: {name} has the value {value!r}, a {type(value).__name__}, but it counts pixels, channels or axes. "
                "Pass an integer."
            ) from None
    if isinstance(number, int) and not -MOST <= number <= MOST:
        raise ValueError(
            f"{op}: {name} has the value {number}, but the largest that is taken is {MOST}; no image has as many pixels on an "
            "axis. Pass a smaller number."
        )
    return number
