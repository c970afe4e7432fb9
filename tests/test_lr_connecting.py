# SPDX-License-Identifier: Apache-2.0
"""scale_learning_rates: which optimizers and models can be connected, how often, and what is said where nobody did."""

from __future__ import annotations

import copy
import pickle
import warnings
import weakref
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
    with pytest.raises(ValueError, match=r"'1' is already connected.*remove"):
        byteback.scale_learning_rates(optimizer, model)


def test_another_optimizer_is_an_error_while_the_first_one_exists() -> None:
    model = network()
    first = SGD(model.parameters(), lr=0.1)
    byteback.scale_learning_rates(first, model)
    with pytest.raises(ValueError, match=r"'1' is already connected to another optimizer \(SGD\).*remove"):
        byteback.scale_learning_rates(torch.optim.Adam(model.parameters()), model)
    assert model[1].scaling.optimizer() is first, "and it stays connected"


@pytest.mark.parametrize("cycle", [False, True], ids=["freed", "in-a-cycle"])
def test_a_model_whose_optimizer_is_gone_is_connected_anew(cycle: bool) -> None:
    """As in a notebook's cell that is run again. The first scaling may still be in a variable."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    if cycle:
        optimizer.own_trainer = [optimizer]  # as a trainer's objects refer to each other
    first = byteback.scale_learning_rates(optimizer, model)
    gradients(model)
    optimizer.step()
    del optimizer, scheduler
    optimizer = SGD(model.parameters(), lr=0.1)
    second = byteback.scale_learning_rates(optimizer, model)
    assert first.factors() == {} and second.factors() == {"1": PHI, "2": PHI}
    first.remove()  # has nothing left to remove
    model.zero_grad()
    gradients(model)
    before, gradient = model[1].weight.detach().clone(), model[1].weight.grad.clone()
    optimizer.step()
    assert torch.allclose(model[1].weight, before - 0.1 * PHI * gradient, rtol=0, atol=1e-6), "scaled once"
    assert int(model[1].quantizers.iteration) == 2 and model[1].hooked


def test_an_optimizer_that_gave_the_weights_up_is_in_nobodys_way() -> None:
    model = network()
    first = SGD(model.parameters(), lr=0.1)
    byteback.scale_learning_rates(first, model)
    first.param_groups[0]["params"] = list(model[0].parameters())
    second = byteback.scale_learning_rates(SGD([model[1].weight, model[2].weight], lr=0.1), model)
    assert second.factors().keys() == {"1", "2"}


def test_a_connected_optimizer_is_not_kept_alive() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaling = byteback.scale_learning_rates(optimizer, model)
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None and scaling.optimizer() is None


# ---- a frozen backbone -----------------------------------------------------------------------------------------------


def with_head(**recipe: Any) -> nn.Sequential:
    """A float convolution, two frozen int8 ones, and a float head."""
    model = network(**recipe).requires_grad_(False)
    return nn.Sequential(model, nn.Flatten(), nn.Linear(8, 3))


def step_with(model: nn.Module, optimizer: Optimizer, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(torch.ones(1, 2, 6, 6)).square().mean() * scale).backward()
    optimizer.step()


def test_an_optimizer_of_the_float_head_has_nothing_to_scale() -> None:
    model = with_head()
    optimizer = SGD(model[2].parameters(), lr=0.1)
    byteback.scale_learning_rates(optimizer, model)
    before, backbone = model[2].weight.detach().clone(), model[0][1].weight.clone()
    step_with(model, optimizer)
    assert torch.allclose(model[2].weight, before - 0.1 * model[2].weight.grad, rtol=0, atol=1e-7)
    assert torch.equal(model[0][1].weight, backbone)
    assert int(model[0][1].quantizers.iteration) == 1, "a frozen layer counts the head's steps"


def test_frozen_layers_that_pass_gradients_on_count_steps_and_say_nothing() -> None:
    model = network()
    model[1].weight.requires_grad_(False), model[2].weight.requires_grad_(False)
    optimizer = SGD(model[0].parameters(), lr=0.1)
    byteback.scale_learning_rates(optimizer, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(25):  # the warning about a missing hook would come at a search
            step_with(model, optimizer)
    assert int(model[1].quantizers.iteration) == 25


def test_a_step_of_the_head_is_dropped_where_the_backbone_meets_nan() -> None:
    model = with_head(on_nonfinite="skip")
    model[0][0].requires_grad_(True)
    optimizer = SGD([*model[0][0].parameters(), *model[2].parameters()], lr=0.1)
    scaling = byteback.scale_learning_rates(optimizer, model)
    before = model[2].weight.detach().clone()
    with pytest.warns(UserWarning, match="dropped"):
        step_with(model, optimizer, float("nan"))
    assert scaling.skipped == 1 and torch.equal(model[2].weight, before)


def test_a_backbone_that_thaws_gets_its_own_optimizer() -> None:
    model = with_head()
    head = SGD(model[2].parameters(), lr=0.1)
    first = byteback.scale_learning_rates(head, model)
    assert first.factors().keys() == {"0.1", "0.2"}
    model[0].requires_grad_(True)
    second = byteback.scale_learning_rates(SGD(model[0].parameters(), lr=0.1), model)
    assert first.factors() == {} and second.factors().keys() == {"0.1", "0.2"}


def test_a_backbone_that_thaws_into_the_same_optimizer_is_scaled() -> None:
    model = with_head()
    optimizer = SGD(model[2].parameters(), lr=0.1)
    byteback.scale_learning_rates(optimizer, model)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    step_with(model, optimizer)
    model[0][1].weight.grad.fill_(1.0)
    before = model[0][1].weight.detach().clone()
    optimizer.step()
    assert torch.allclose(model[0][1].weight, before - 0.1 * PHI, rtol=0, atol=1e-6)


def test_one_optimizer_has_one_pair_of_hooks() -> None:
    """Of the head too, for which nothing is scaled."""
    model = with_head()
    optimizer = SGD(model[2].parameters(), lr=0.1)
    byteback.scale_learning_rates(optimizer, model)
    with pytest.raises(ValueError, match=r"'0.1' is already connected to this optimizer.*remove"):
        byteback.scale_learning_rates(optimizer, model)
    model[0].requires_grad_(True)
    other = SGD(model[2].parameters(), lr=0.1)
    for _ in range(2):
        byteback.scale_learning_rates(other, model)
    assert len(other._optimizer_step_pre_hooks) == 1


# ---- who cannot be connected, and who is not -------------------------------------------------------------------------


def test_an_optimizer_of_another_model_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"SGD has none of the 2 int8 weights of this model"):
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


class Module(nn.Module):
    """As a trainer's module, which may keep what scale_learning_rates returned."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()
        self.scaling: Any = None


def test_copies_and_pickles_leave_the_optimizer_behind() -> None:
    module = Module()
    optimizer = SGD(module.parameters(), lr=0.1)
    module.scaling = byteback.scale_learning_rates(optimizer, module)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), pickle.loads(pickle.dumps(module.model))):
        layers = [layer for layer in twin.modules() if hasattr(layer, "quantizers")]
        assert layers and all(layer.scaling is None and not layer.hooked for layer in layers)
        kept = getattr(twin, "scaling", None)
        assert kept is None or (kept.optimizer() is None and kept.model is twin)
        byteback.scale_learning_rates(SGD(twin.parameters(), lr=0.1), twin)
    assert module.scaling.optimizer() is optimizer and b"SGD" not in pickle.dumps(module)


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
