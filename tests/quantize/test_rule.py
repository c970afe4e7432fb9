# SPDX-License-Identifier: Apache-2.0
"""TensorRule: what it refuses, and that it is plain frozen data."""

import dataclasses

import pytest

from byteback import DirectionSensitive, MaxAbs, TensorRule


def test_defaults():
    assert TensorRule() == TensorRule(clip=MaxAbs(), rounding="nearest", per="tensor")
    assert hash(TensorRule()) == hash(TensorRule()) and TensorRule() != TensorRule(per="K")


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TensorRule().per = "K"


def test_unknown_rounding():
    with pytest.raises(ValueError, match="TensorRule: rounding is 'up'; choose one of nearest, stochastic"):
        TensorRule(rounding="up")


def test_unknown_granularity():
    with pytest.raises(ValueError, match="TensorRule: per is 'channel'; choose one of tensor, N, C, K"):
        TensorRule(per="channel")


def test_granularity_that_the_clip_rule_cannot_serve():
    with pytest.raises(ValueError, match=r"per is 'N', but DirectionSensitive chooses clips only per tensor, K\. Change"):
        TensorRule(clip=DirectionSensitive(), per="N")
