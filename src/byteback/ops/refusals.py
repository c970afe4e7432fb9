# SPDX-License-Identifier: Apache-2.0
"""NaN and Inf where a look at a tensor costs time: a step flags them on the tensor's device, and the flags are read later.

A backend whose steps say `defers` raises nothing and reads no count. It calls

    counted      how many values of a tensor are NaN or Inf, as a tensor; a kernel may have counted them already
    Unless       puts a quantizer's state back where the tensor was bad: what is not finite is not remembered
    judged       counts and flags the tensor, and gives its integers and scale what the policy says

`nn/flags.py` reads the flags of all layers in one look: in the optimizer's hook, or when the next forward begins. They are the
column NONFINITE of a quantizer's `unshared`, and of the tensor of the same shape that a layer has for its weight:

    MET         tensors with NaN or Inf since the flags were read, under every policy
    REFUSED     1 where one of them has to become an error; the rows below are of the first such tensor
    VALUES      how many of its values are NaN or Inf
    ITERATION   when it was met
    ORDER       when it was met among all tensors that this process has judged: of all layers the first is named

Several ranks add them up (nn/ranks.py), so REFUSED says how many ranks have added to the rows below it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from byteback.ops.quantizer import NONFINITE, NonFiniteError, State

MET, REFUSED, VALUES, ITERATION, ORDER = range(5)
"""Rows of the column NONFINITE."""

_order = itertools.count(1)


def refusal(layer: str, role: str, values: int, iteration: int, late: str = "") -> NonFiniteError:
    """The error of a tensor that cannot be quantized; `late` says why it comes later than the tensor."""
    return NonFiniteError(
        f"{layer}: {role} holds {values} NaN or Inf values at iteration {iteration}; int8 has "
        "neither, so it cannot be quantized. Lower the learning rate or look for the layer that overflowed; "
        f'on_nonfinite="skip" drops such steps, on_nonfinite="propagate" hands NaN on (for a GradScaler).{late}'
    )


def scale_of(policy: str) -> float:
    """The scale of a tensor that counts as 0."""
    return math.nan if policy == "propagate" else 1.0


# ---- on the device: no number is looked at ---------------------------------------------------------------------------


def counted(x: Tensor) -> Tensor:
    """How many values are NaN or Inf.

    >>> counted(torch.tensor([1.0, float("nan"), float("inf")]))
    tensor(2)
    """
    return (~torch.isfinite(x)).sum()


def judged(
    q: tuple[Tensor, Tensor], nonfinite: Tensor, iteration: Tensor, state: State, settings: Any, remember: bool
) -> tuple[Tensor, Tensor]:
    """Integers and scale of a tensor with so many NaN or Inf values; it is counted and flagged."""
    # Outside training there is no step to drop or to refuse, and nothing to count: a prediction from NaN is NaN.
    policy = "propagate"
    if remember or settings.role == "grad_output":
        policy = settings.on_nonfinite
        bad = nonfinite > 0
        state.nonfinite.add_(bad)
        state.unshared[MET, NONFINITE].add_(bad)
        if policy == "raise":
            flag(state.unshared, nonfinite, iteration)
    return filled(q, nonfinite, policy)


def flag(unshared: Tensor, nonfinite: Tensor, iteration: Tensor) -> None:
    """Leaves an error for whoever reads the flags, unless there is one already."""
    rows = unshared[REFUSED : ORDER + 1, NONFINITE]
    found = [rows.new_ones(()), nonfinite.to(rows.dtype), iteration.to(rows.dtype), rows.new_full((), next(_order))]
    is_first = (nonfinite > 0) & (rows[0] == 0.0)
    rows.copy_(torch.where(is_first, torch.stack(found), rows))


def filled(q: tuple[Tensor, Tensor], nonfinite: Tensor, policy: str) -> tuple[Tensor, Tensor]:
    """Where the tensor was bad: zeros with the scale that the policy gives it; these are new tensors.

    >>> filled((torch.tensor([[5]], dtype=torch.int8), torch.tensor([[0.1]])), torch.tensor(1), "skip")
    (tensor([[0]], dtype=torch.int8), tensor([[1.]]))
    """
    values, scale = q
    bad = nonfinite > 0
    return values.masked_fill(bad, 0), scale.masked_fill(bad, scale_of(policy))


class Unless:
    """One row of a quantizer's state as it is now, to put back where a tensor turns out to be bad."""

    def __init__(self, state: State, slot: int) -> None:
        kept = (state.clip, state.initialized, state.updated_at, state.observed, state.seen, state.tracked)
        self._rows = [tensor[slot] for tensor in kept if tensor is not None]
        self._rows.append(state.unshared[slot, :NONFINITE])
        self._before = [row.clone() for row in self._rows]

    def put_back(self, bad: Tensor) -> None:
        """The row as it was, where `bad`."""
        for row, before in zip(self._rows, self._before, strict=True):
            row.copy_(torch.where(bad, before, row))


# ---- on the host, after the one look ----------------------------------------------------------------------------------


def first(columns: Sequence[Sequence[float]], names: Sequence[tuple[str, str]], late: str = "") -> NonFiniteError | None:
    """The error of the tensor that was met first, given the column NONFINITE of each (layer, role); None without one."""
    refused = [index for index, column in enumerate(columns) if column[REFUSED]]
    if not refused:
        return None
    index = min(refused, key=lambda index: columns[index][ORDER] / columns[index][REFUSED])
    column, (layer, role) = columns[index], names[index]
    return refusal(layer, role, int(column[VALUES]), round(column[ITERATION] / column[REFUSED]), late)
