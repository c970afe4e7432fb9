# SPDX-License-Identifier: Apache-2.0
"""enabled switches a whole model to float and back, for good or for the time of a `with` block."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import byteback
from byteback.convert.layers import int8_layers
from small_convnet import images, small


def test_enabled_false_is_the_float_model_exactly_and_true_brings_int8_back() -> None:
    plain = small()
    model = byteback.prepare(copy.deepcopy(plain), "plain-int8")
    int8 = model(images())
    model[1].load_state_dict(plain[1].state_dict())  # BatchNorm's averages moved with that forward
    assert byteback.enabled(model, False).model is model

    expected, output = plain(images()), model(images())
    assert torch.equal(output, expected)
    expected.square().sum().backward()
    output.square().sum().backward()
    for (name, parameter), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(parameter.grad, wanted.grad), name
    assert not bool(model[2].quantizers.grad_output.initialized.any()), "float steps must not touch quantizer state"

    byteback.enabled(model)
    assert torch.equal(model(images()), int8)
    assert not torch.equal(int8, expected)


def states(model: nn.Module) -> list[bool]:
    return [layer.enabled for layer in int8_layers(model, "test").values()]


def test_a_with_block_restores_the_state_before() -> None:
    model = byteback.prepare(small(), "plain-int8").eval()
    model(images())
    int8 = model(images())
    with byteback.enabled(model, False) as inside:
        assert inside is model and not any(states(model))
        in_float = model(images())
        with byteback.enabled(model):
            assert all(states(model)) and torch.equal(model(images()), int8)
        assert not any(states(model)), "the state before was float"
    assert all(states(model)) and torch.equal(model(images()), int8)
    assert not torch.equal(in_float, int8)


def test_a_with_block_restores_each_layer_by_itself() -> None:
    model = byteback.prepare(small(), "plain-int8")
    model[2].enabled = False
    with byteback.enabled(model, True):
        assert states(model) == [True, True]
    assert states(model) == [False, True]


def test_fused_float_convolutions_are_switched_too() -> None:
    model = byteback.prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), "plain-int8")
    assert type(model[0]).__name__ == "FusedConv2d"
    with byteback.enabled(model, False):
        assert not model[0].enabled
    assert model[0].enabled


def test_the_state_is_restored_after_an_error() -> None:
    model = byteback.prepare(small(), "plain-int8")
    with pytest.raises(ZeroDivisionError), byteback.enabled(model, False):
        raise ZeroDivisionError
    assert all(states(model))


def test_a_switch_can_be_used_again() -> None:
    model = byteback.prepare(small(), "plain-int8")
    in_float = byteback.enabled(model, False)
    for _ in range(2):
        with in_float:
            assert not any(states(model))
        assert all(states(model))


def test_a_model_restored_inside_the_block_is_left_alone() -> None:
    model = byteback.prepare(small(), "plain-int8")
    with byteback.enabled(model, False):
        byteback.restore(model)
    assert not hasattr(model[2], "enabled") and type(model[2]) is nn.Conv2d


def test_the_result_can_be_used_like_the_model() -> None:
    """Earlier versions returned the model."""
    model = byteback.prepare(small(), "plain-int8")
    switched = byteback.enabled(model, False)
    assert switched.model is model and switched.eval() is model
    assert torch.equal(switched(images()), model(images()))
    assert [name for name, _ in switched.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert copy.copy(switched).model is model
    with pytest.raises(AttributeError, match="no_such_name"):
        switched.no_such_name  # noqa: B018


def test_a_float_model_has_nothing_to_switch() -> None:
    with pytest.raises(ValueError, match=r"enabled: .* has no int8 layer"):
        byteback.enabled(small())
