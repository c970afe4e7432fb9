# SPDX-License-Identifier: Apache-2.0
"""Clip rules: the base class, and max|x|."""

import dataclasses

import pytest
import torch

from byteback import ClipRule, MaxAbs, Memory

NOTHING = Memory(torch.zeros(1), False, 0, 0)


@pytest.mark.parametrize(
    ("axis", "clip"),
    [(-1, [[[4.0]]]), (0, [[[3.0]], [[4.0]]]), (1, [[[3.0], [4.0]]])],
    ids=["tensor", "N", "C"],
)
def test_max_abs(axis, clip):
    x = torch.tensor([[[1.0, -3.0], [2.0, 0.5]], [[0.0, 1.0], [-4.0, 3.0]]])
    choice = MaxAbs().choose(x, axis, NOTHING)
    assert choice.clip.tolist() == clip and choice.remember.tolist() == clip
    assert not choice.searched and choice.diagnostics == ()


def test_max_abs_of_nan_is_nan():
    assert MaxAbs().choose(torch.tensor([[1.0, float("nan")]]), -1, NOTHING).clip.isnan().all()


def test_max_abs_of_nothing_is_zero():
    assert MaxAbs().choose(torch.zeros(0, 3), -1, NOTHING).clip.tolist() == [[0.0]]


def test_max_abs_is_never_stale():
    assert not MaxAbs().is_stale(MaxAbs().choose(torch.ones(1, 1), -1, NOTHING), 1.0, 1e9)


def test_base_rule_must_be_written():
    with pytest.raises(NotImplementedError, match=r"ClipRule\.choose"):
        ClipRule().choose(torch.ones(1, 1), -1, NOTHING)


def test_rules_are_frozen_and_hashable():
    assert MaxAbs() == MaxAbs() and hash(MaxAbs()) == hash(MaxAbs()) and MaxAbs() != ClipRule()
    with pytest.raises(dataclasses.FrozenInstanceError):
        NOTHING.iteration = 3
