# SPDX-License-Identifier: Apache-2.0
"""scale_learning_rates: which optimizers and models can be connected, how often, and what is said where nobody did."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import byteback
from fixed_factor import PHI, Fixed, gradients, network


class Wrapper(Optimizer):
    """As accelerate's: an Optimizer by class, whose step() calls the one inside."""

    def __init__(self, inner: Optimizer) -> None:
        self.optimizer = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


class PlainWrapper:
    def __init__(self, inner: Any) -> None:
        self.optimizer = inner

    def step(self) -> None:
        self.optimizer.step()


@pytest.mark.parametrize(
    "wrap", [Wrapper, PlainWrapper, lambda inner: PlainWrapper(Wrapper(inner))], ids=["optimizer", "plain", "both"]
)
def test_a_wrapped_optimizer_is_scaled_once(wrap: Callable[[Optimizer], Any]) -> None:
    model = network()
    optimizer = wrap(SGD(model.parameters(), lr=0.1))
    byteback.scale_learning_rates(optimizer, model)
    gradients(model)
    before, gradient = model[1].weight.detach().clone(), model[1].weight.grad.clone()
    optimizer.step()
    assert torch.allclose(model[1].weight, before - 0.1 * PHI * gradient, rtol=0, atol=1e-6)
    assert int(model[1].quantizers.iteration) == 1


@pytest.mark.parametrize("thing", [object(), PlainWrapper(3), [1, 2]], ids=["object", "wrapper-of-a-number", "list"])
def test_anything_else_is_a_type_error(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"scale_learning_rates: got a .*torch\.optim\.Optimizer"):
        byteback.scale_learning_rates(thing, network())


def test_connecting_twice_is_an_error() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    byteback.scale_learning_rates(optimizer, model)
    with pytest.raises(ValueError, match=r"'1' is connected already.*remove"):
        byteback.scale_learning_rates(optimizer, model)


def test_an_optimizer_of_another_model_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"SGD holds none of this model's 2 int8 weights"):
        byteback.scale_learning_rates(SGD(network().parameters(), lr=0.1), network())


def test_an_unprepared_model_is_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1))
    with pytest.raises(ValueError, match=r"scale_learning_rates: .*prepare"):
        byteback.scale_learning_rates(SGD(model.parameters(), lr=0.1), model)


def test_two_optimizers_share_a_model() -> None:
    model = network()
    one, other = SGD(model[1].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)
    assert byteback.scale_learning_rates(one, model).factors().keys() == {"1"}
    assert byteback.scale_learning_rates(other, model).factors().keys() == {"2"}


def test_remove_gives_the_plain_optimizer_back() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaling = byteback.scale_learning_rates(optimizer, model)
    scaling.remove()
    gradients(model)
    before, gradient = model[1].weight.detach().clone(), model[1].weight.grad.clone()
    optimizer.step()
    assert torch.allclose(model[1].weight, before - 0.1 * gradient, rtol=0, atol=1e-7)
    byteback.scale_learning_rates(optimizer, model)  # and it may be connected again


def test_preparing_and_connecting_again_after_restore_scales_once() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    byteback.scale_learning_rates(optimizer, model)
    byteback.restore(model)
    byteback.prepare(model, byteback.UnifiedInt8(learning_rate=Fixed()))
    byteback.scale_learning_rates(optimizer, model)
    gradients(model)
    before, gradient = model[1].weight.detach().clone(), model[1].weight.grad.clone()
    optimizer.step()
    assert torch.allclose(model[1].weight, before - 0.1 * PHI * gradient, rtol=0, atol=1e-6)
    assert int(model[1].quantizers.iteration) == 1


def test_a_copy_is_not_connected() -> None:
    model = network()
    byteback.scale_learning_rates(SGD(model.parameters(), lr=0.1), model)
    average = torch.optim.swa_utils.AveragedModel(model)
    for twin in (copy.deepcopy(model), average.module):
        assert model[1].hooked and not twin[1].hooked
        byteback.scale_learning_rates(SGD(twin.parameters(), lr=0.1), twin)


def hook_warnings(model: nn.Module, passes: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(passes):
            model(torch.ones(1, 2, 6, 6)).square().sum().backward()
    return [str(item.message) for item in caught if "scale_learning_rates" in str(item.message)]


def test_a_missing_hook_is_said_once() -> None:
    messages = hook_warnings(network(), 40)
    assert len(messages) == 1
    assert "no optimizer is connected" in messages[0]


def test_a_hook_that_never_fires_is_said_once() -> None:
    model = network()
    byteback.scale_learning_rates(SGD(model.parameters(), lr=0.1), model)
    messages = hook_warnings(model, 120)
    assert len(messages) == 1
    assert "no optimizer step was seen" in messages[0]


def test_a_recipe_that_needs_no_hook_says_nothing() -> None:
    assert hook_warnings(network(phi=None), 120) == []
