# SPDX-License-Identifier: Apache-2.0
"""Deferred errors for NaN and Inf on devices where reading a value synchronizes: a step sets flags, which are read later.

A backend whose steps set `defers` raises no error and reads no count. It calls

    counted      returns how many values of a tensor are NaN or Inf, as a tensor; a kernel may have counted them already
    Unless       restores the state of a quantizer if the tensor was not finite
    judged       counts and flags the tensor, and changes its integers and scale by the policy

`nn/flags.py` reads the flags of all layers at once: in the optimizer's hook, or at the start of the next forward. They are the
column NONFINITE of the `unshared` of a quantizer, and of a tensor of the same shape that a layer has for its weight:

    MET         number of tensors with NaN or Inf since the flags were read, for every policy
    REFUSED     1 if one of them must raise an error; the rows below are of the first such tensor
    VALUES      how many of its values are NaN or Inf
    ITERATION   its iteration
    ORDER       its position among all tensors that this process has checked; the error names the first of all layers

Several ranks add their flags (nn/ranks.py), so REFUSED is the number of ranks whose values are added in the rows below.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from byteback.ops.quantizer import NONFINITE, NonFiniteError, State
from byteback.ops.types import QTensor

MET, REFUSED, VALUES, ITERATION, ORDER = range(5)
"""Rows of the column NONFINITE."""

_order = itertools.count(1)


def refusal(layer: str, role: str, values: int, iteration: int, late: str = "") -> NonFiniteError:
    """Returns the error of a tensor that cannot be quantized. `late` explains why the error is raised later."""
    return NonFiniteError(
        f"{layer}: {role} holds {values} NaN or Inf values at iteration {iteration}; int8 cannot represent them. "
        "Lower the learning rate, or find the layer that overflowed. "
        f'on_nonfinite="skip" skips such steps, on_nonfinite="propagate" propagates NaN (for a GradScaler).{late}'
    )


def scale_of(policy: str) -> float:
    """Returns the scale of a tensor whose integers were set to 0."""
    return math.nan if policy == "propagate" else 1.0


# ---- on the device, without synchronization --------------------------------------------------------------------------


def counted(x: Tensor) -> Tensor:
    """Returns how many values are NaN or Inf.

    >>> counted(torch.tensor([1.0, float("nan"), float("inf")]))
    tensor(2)
    """
    return (~torch.isfinite(x)).sum()


def judged(q: QTensor, nonfinite: Tensor, iteration: Tensor, state: State, settings: Any, remember: bool) -> QTensor:
    """Counts and flags a tensor with `nonfinite` NaN or Inf values. Returns its integers and scale by the policy."""
    # Outside training there is no step to skip and nothing to count: a prediction from NaN is NaN.
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
    """Sets the flags of an error, unless one is set already."""
    rows = unshared[REFUSED : ORDER + 1, NONFINITE]
    found = [rows.new_ones(()), nonfinite.to(rows.dtype), iteration.to(rows.dtype), rows.new_full((), next(_order))]
    is_first = (nonfinite > 0) & (rows[0] == 0.0)
    rows.copy_(torch.where(is_first, torch.stack(found), rows))


def filled(q: QTensor, nonfinite: Tensor, policy: str) -> QTensor:
    """Returns new tensors: q, or zeros and the scale of the policy if `nonfinite` is not 0.

    >>> filled(QTensor(torch.tensor([[5]], dtype=torch.int8), torch.tensor([[0.1]])), torch.tensor(1), "skip")[:2]
    (tensor([[0]], dtype=torch.int8), tensor([[1.]]))
    """
    bad = nonfinite > 0
    return QTensor(q.values.masked_fill(bad, 0), q.scale.masked_fill(bad, scale_of(policy)), q.counts)


class Unless:
    """A copy of one row of the state of a quantizer, to restore it if the tensor is not finite."""

    def __init__(self, state: State, slot: int) -> None:
        kept = (state.clip, state.initialized, state.updated_at, state.observed, state.seen, state.tracked)
        self._rows = [tensor[slot] for tensor in kept if tensor is not None]
        self._rows.append(state.unshared[slot, :NONFINITE])
        self._before = [row.clone() for row in self._rows]

    def put_back(self, bad: Tensor) -> None:
        """Restores the row if `bad`."""
        for row, before in zip(self._rows, self._before, strict=True):
            row.copy_(torch.where(bad, before, row))


# ---- on the host, after the flags were read ---------------------------------------------------------------------------


def first(columns: Sequence[Sequence[float]], names: Sequence[tuple[str, str]], late: str = "") -> NonFiniteError | None:
    """Returns the error of the first flagged tensor, from the column NONFINITE of each (layer, role); None if there is none."""
    refused = [index for index, column in enumerate(columns) if column[REFUSED]]
    if not refused:
        return None
    index = min(refused, key=lambda index: columns[index][ORDER] / columns[index][REFUSED])
    column, (layer, role) = columns[index], names[index]
    return refusal(layer, role, int(column[VALUES]), round(column[ITERATION] / column[REFUSED]), late)
