# SPDX-License-Identifier: Apache-2.0
"""Flags of NaN and Inf: written without a look, and the first tensor that was met is the one that is named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from byteback.ops.quantizer import COLUMNS, NONFINITE, State
from byteback.ops.refusals import ITERATION, MET, ORDER, REFUSED, VALUES, Unless, counted, filled, first, flag, judged
from byteback.ops.types import QTensor
from byteback.quantize import Settings, TensorRule

NAN = float("nan")


def settings(policy: str, role: str = "input") -> Settings:
    return Settings(TensorRule(), role, "conv", policy, 10, 0.1)


def fresh_state(device: str = "cpu") -> State:
    def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    updated_at, nonfinite = zeros(8, dtype=torch.int64), zeros(dtype=torch.int64)
    unshared = zeros(8, 5, dtype=torch.float64)
    return State(zeros(8, 2), zeros(8), updated_at, zeros(8, COLUMNS), zeros(8), zeros(8, 2), nonfinite, unshared)


def integers(device: str = "cpu") -> QTensor:
    return QTensor(torch.full((2, 2), 5, dtype=torch.int8, device=device), torch.full((1, 1), 0.5, device=device))


@pytest.mark.parametrize(("policy", "scale"), [("raise", 1.0), ("skip", 1.0), ("propagate", NAN)])
def test_a_bad_tensor_counts_as_zeros(policy: str, scale: float) -> None:
    state = fresh_state()
    q = integers()
    values, found = judged(q, torch.tensor(3), torch.tensor(7), state, settings(policy), remember=True)[:2]
    assert not values.any() and torch.equal(found.nan_to_num(-1.0), torch.full((1, 1), scale).nan_to_num(-1.0))
    assert q[0].all(), "other layers may read the same integers"
    column = state.unshared[:, NONFINITE].tolist()
    assert column[MET] == 1.0 and int(state.nonfinite) == 1
    expected = [1.0, 3.0, 7.0] if policy == "raise" else [0.0, 0.0, 0.0]
    assert column[REFUSED : ITERATION + 1] == expected and bool(column[ORDER]) == (policy == "raise")


def test_a_finite_tensor_is_left_alone() -> None:
    state = fresh_state()
    values, scale = judged(integers(), torch.tensor(0), torch.tensor(7), state, settings("raise"), remember=True)[:2]
    assert torch.equal(values, integers()[0]) and torch.equal(scale, integers()[1])
    assert not state.unshared.any() and int(state.nonfinite) == 0


@pytest.mark.parametrize(("role", "counts"), [("input", 0), ("grad_output", 1)])
def test_outside_training_only_gradients_count(role: str, counts: int) -> None:
    state = fresh_state()
    scale = judged(integers(), torch.tensor(1), torch.tensor(7), state, settings("raise", role), remember=False).scale
    assert int(state.nonfinite) == counts and bool(state.unshared.any()) == bool(counts)
    assert bool(scale.isnan()) != bool(counts)


def test_the_first_tensor_is_named() -> None:
    early, late = torch.zeros(8, 5, dtype=torch.float64), torch.zeros(8, 5, dtype=torch.float64)
    flag(late, torch.tensor(0), torch.tensor(4))  # finite
    flag(early, torch.tensor(2), torch.tensor(4))
    flag(late, torch.tensor(9), torch.tensor(5))
    flag(early, torch.tensor(8), torch.tensor(6))  # the first of its own is kept
    columns = [tensor[:, NONFINITE].tolist() for tensor in (late, early)]
    error = first(columns, [("head", "input"), ("stem", "weight")])
    assert str(error).startswith("stem: weight holds 2 NaN or Inf values at iteration 4;")
    assert first([[0.0] * 8], [("head", "input")]) is None


def test_flags_of_several_ranks_add_up() -> None:
    """Two ranks have met 2 and 3 values, both at iteration 4; the sums say so."""
    sums = torch.zeros(8, 5, dtype=torch.float64)
    for values in (2, 3):
        own = torch.zeros_like(sums)
        flag(own, torch.tensor(values), torch.tensor(4))
        sums += own
    assert sums[REFUSED, NONFINITE] == 2.0 and sums[VALUES, NONFINITE] == 5.0
    error = first([sums[:, NONFINITE].tolist()], [("conv", "grad_output")])
    assert str(error).startswith("conv: grad_output holds 5 NaN or Inf values at iteration 4;")


@pytest.mark.parametrize("bad", [True, False])
def test_what_a_bad_tensor_left_behind_goes_back(bad: bool) -> None:
    state = fresh_state()
    before = [tensor.clone() for tensor in state if tensor is not None]
    unless = Unless(state, 3)
    for tensor in (state.clip, state.initialized, state.updated_at, state.observed, state.seen, state.tracked):
        assert tensor is not None
        tensor[3] = 1
    state.unshared[3, :NONFINITE] = 1.0
    unless.put_back(torch.tensor(bad))
    assert all(map(torch.equal, [tensor for tensor in state if tensor is not None], before)) == bad


def test_nothing_is_looked_at() -> None:
    """Meta tensors have no numbers: a look would be an error."""
    state, now = fresh_state("meta"), torch.tensor(0, device="meta")
    unless = Unless(state, 1)
    nonfinite = counted(torch.empty(4, 4, device="meta"))
    unless.put_back(nonfinite > 0)
    for policy in ("raise", "skip", "propagate"):
        values, scale = judged(integers("meta"), nonfinite, now, state, settings(policy), remember=True)[:2]
        assert values.is_meta and scale.is_meta
    flag(state.unshared, nonfinite, now)
    assert filled(integers("meta"), nonfinite, "skip")[0].shape == (2, 2)
