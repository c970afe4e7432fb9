# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing runs a forward again: neither gradients nor state may notice."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from byteback import DirectionSensitive, MagnitudeAware, PlainInt8, Recipe, TensorRule, prepare
from small_layers import image, recipes, with_nan


class Net(nn.Module):
    """stem (float), then conv `calls` times, each time checkpointed or not."""

    def __init__(self, calls=1, how=None):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.calls, self.how = calls, how

    def forward(self, x):
        x = self.stem(x)
        for _ in range(self.calls):
            block = lambda x: self.conv(x).relu() + x  # noqa: E731
            x = block(x) if self.how is None else checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return x


def net(recipe, calls=1, how=None):
    torch.manual_seed(0)
    return prepare(Net(calls, how), recipe)


def trained(model, steps=2, policy_nan=False):
    """Gradients after a few steps without an optimizer."""
    for seed in range(steps):
        model.zero_grad()
        x = with_nan(image(seed)) if policy_nan else image(seed)
        model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@recipes
@pytest.mark.parametrize("how", ["non-reentrant", "reentrant"])
def test_checkpointing_changes_neither_gradients_nor_state(recipe, how, differing):
    plain, checkpointed = net(recipe), net(recipe, how=how)
    for a, b in zip(trained(plain), trained(checkpointed), strict=True):
        assert torch.equal(a, b)
    assert differing(plain, checkpointed) == []
    assert int(plain.conv.quantizers.count) == 2


@pytest.mark.parametrize("role", ["input", "weight"])
@pytest.mark.parametrize("rule", [MagnitudeAware(), DirectionSensitive()], ids=lambda rule: type(rule).__name__)
def test_rule_that_looks_back_is_refused_in_the_forward_pass(role, rule):
    """A recomputed forward would find its own clip in the memory and choose another one."""
    with pytest.raises(ValueError, match=rf"^Recipe: {role}\.clip is .*depends on earlier.*Use this rule for gradients only"):
        Recipe(**{role: TensorRule(rule)})


@recipes
def test_non_reentrant_checkpointing_of_a_shared_layer(recipe, differing):
    plain, checkpointed = net(recipe, calls=3), net(recipe, calls=3, how="non-reentrant")
    for a, b in zip(trained(plain), trained(checkpointed), strict=True):
        assert torch.equal(a, b)
    assert differing(plain, checkpointed) == []


def test_reentrant_checkpointing_of_a_shared_layer_is_an_error():
    model = net("unified-int8", calls=2, how="reentrant")
    with pytest.raises(RuntimeError, match=r"conv: this layer is called 2 times.*use_reentrant=False"):
        trained(model, steps=1)


def test_recomputation_does_not_count_a_nan_twice():
    recipe = PlainInt8(on_nonfinite="skip")
    plain, checkpointed = net(recipe), net(recipe, how="non-reentrant")
    trained(plain, steps=1, policy_nan=True)
    trained(checkpointed, steps=1, policy_nan=True)
    assert int(checkpointed.conv.quantizers.nonfinite) == int(plain.conv.quantizers.nonfinite)
