# SPDX-License-Identifier: Apache-2.0
"""scale_learning_rates: a factor on the step and not on the gradient, for every optimizer.

The oracle is the definition: take the same optimizer's step without hooks, then w = w0 + φ (w - w0); for SGD with momentum
w + (1 - φ) lr v. A recipe whose rule returns a fixed φ makes that checkable to the last bit.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import byteback
from byteback import lr_scaling
from fixed_factor import OPTIMIZERS, PHI, Fixed, gradients, is_scaled, network, shortened, stepped_back, weights


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_the_step_is_the_optimizers_own_shortened_by_phi(build: Callable[[Any], Optimizer]) -> None:
    model = network()
    twin = copy.deepcopy(model)
    optimizer, oracle = build(model.parameters()), build(twin.parameters())
    byteback.scale_learning_rates(optimizer, model)
    for step in range(3):
        before = weights(model)
        for side in (model, twin):
            side.zero_grad()
            gradients(side, seed=step)
        optimizer.step()
        oracle.step()
        for name, parameter in twin.named_parameters():
            if is_scaled(name):
                group, kept = oracle.param_groups[0], oracle.state[parameter]
                made = shortened(before[name], parameter.detach(), PHI)
                if isinstance(oracle, SGD) and group["momentum"] and not (group["nesterov"] or group["fused"]):
                    made = stepped_back(before[name], parameter.detach(), PHI, kept["momentum_buffer"], group["lr"])
                parameter.data.copy_(made)
        for name, value in weights(model).items():
            assert torch.equal(value, weights(twin)[name]), f"{name} after step {step}"
            assert not torch.equal(value, before[name]), f"{name} did not move"


def test_sgd_with_momentum_copies_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Tensor] = []
    monkeypatch.setattr(lr_scaling, "_copy", lambda weight: copied.append(weight) or weight.clone())
    for name, count in {"sgd-momentum": 0, "sgd-foreach": 0, "sgd": 2, "adam": 2}.items():
        model = network()
        optimizer = OPTIMIZERS[name](model.parameters())
        byteback.scale_learning_rates(optimizer, model)
        gradients(model)
        optimizer.step()
        assert len(copied) == count, name
        copied.clear()


def test_a_weight_that_the_optimizer_skips_does_not_move() -> None:
    """A hook after ours removes a gradient, so the momentum of the step before must not be applied again."""
    model = network()
    optimizer = OPTIMIZERS["sgd-momentum"](model.parameters())
    byteback.scale_learning_rates(optimizer, model)
    gradients(model)
    optimizer.step()
    before = weights(model)
    optimizer.register_step_pre_hook(lambda *_: setattr(model[1].weight, "grad", None))
    gradients(model, seed=1)
    optimizer.step()
    assert torch.equal(weights(model)["1.weight"], before["1.weight"])
    assert not torch.equal(weights(model)["2.weight"], before["2.weight"])


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_the_optimizers_own_state_never_notices(build: Callable[[Any], Optimizer]) -> None:
    model = network()
    twin = copy.deepcopy(model)
    optimizer, unhooked = build(model.parameters()), build(twin.parameters())
    byteback.scale_learning_rates(optimizer, model)
    for side, its_optimizer in ((model, optimizer), (twin, unhooked)):
        gradients(side)
        its_optimizer.step()
    states, expected = optimizer.state_dict()["state"], unhooked.state_dict()["state"]
    assert states.keys() == expected.keys()
    for index, state in expected.items():
        for key, value in state.items():
            same = torch.equal(states[index][key], value) if isinstance(value, Tensor) else states[index][key] == value
            assert same, f"{key} of parameter {index}"


def test_phi_of_one_leaves_the_bits_alone() -> None:
    model = network(phi=1.0)
    twin = copy.deepcopy(model)
    build = OPTIMIZERS["sgd-momentum-decay-nesterov"]
    optimizer, unhooked = build(model.parameters()), build(twin.parameters())
    byteback.scale_learning_rates(optimizer, model)
    for step in range(3):
        for side, its_optimizer in ((model, optimizer), (twin, unhooked)):
            gradients(side, seed=step)
            its_optimizer.step()
    assert all(torch.equal(value, weights(twin)[name]) for name, value in weights(model).items())


def test_a_recipe_without_a_rule_scales_nothing_but_counts_iterations() -> None:
    model = network(phi=None)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaling = byteback.scale_learning_rates(optimizer, model)
    gradients(model)
    expected = {name: p.detach() - 0.1 * p.grad for name, p in model.named_parameters()}
    optimizer.step()
    assert scaling.factors() == {"1": 1.0, "2": 1.0}
    assert all(torch.allclose(value, expected[name], rtol=0, atol=1e-7) for name, value in weights(model).items())
    assert int(model[1].quantizers.iteration) == 1


def test_the_paper_rule_scales_by_exp_of_the_measured_deviation() -> None:
    """The default recipe end to end: φ = max(exp(-20 d), 0.1), with d as the layer observed it."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1))
    byteback.prepare(model, "unified-int8")
    optimizer = SGD(model.parameters(), lr=0.1)
    scaling = byteback.scale_learning_rates(optimizer, model)
    assert scaling.factors() == {"1": 1.0, "2": 1.0}, "nothing measured yet"
    gradients(model)
    model[1].quantizers.grad_output.observed[0, 1] = 0.01  # exp(-0.2) = 0.8187
    model[2].quantizers.grad_output.observed[0, 1] = 0.5  # exp(-10) is below β = 0.1
    assert scaling.factors() == pytest.approx({"1": 0.8187308, "2": 0.1}, rel=1e-6)
    before, gradient = model[2].weight.detach().clone(), model[2].weight.grad.clone()
    optimizer.step()
    assert torch.allclose(model[2].weight, before - 0.1 * 0.1 * gradient, rtol=0, atol=1e-7)


def test_it_is_not_a_scaled_gradient() -> None:
    """Two steps of momentum 0.5 at lr 1 from w = 0, with gradients 1 then 0, and φ = 0.3 in the first step only:

    scaled step       w1 = -0.3 · 1 = -0.3     v = 1       w2 = -0.3 - 0.5 · 1   = -0.8
    scaled gradient   w1 = -0.3                v = 0.3     w2 = -0.3 - 0.5 · 0.3 = -0.45
    """
    model = network()
    model[1].weight.data.zero_()
    optimizer = SGD([model[1].weight], lr=1.0, momentum=0.5)
    byteback.scale_learning_rates(optimizer, model)
    gradients(model)
    model[1].weight.grad = torch.ones_like(model[1].weight)
    optimizer.step()
    assert model[1].weight.unique().tolist() == pytest.approx([-0.3])
    model[1].recipe = byteback.UnifiedInt8(learning_rate=Fixed(1.0))
    model[1].weight.grad = torch.zeros_like(model[1].weight)
    optimizer.step()
    assert model[1].weight.unique().tolist() == pytest.approx([-0.8])


def test_parameter_groups_keep_their_own_learning_rates() -> None:
    model = network()
    optimizer = SGD([{"params": model[1].parameters(), "lr": 0.5}, {"params": model[2].parameters(), "lr": 0.01}], lr=9)
    byteback.scale_learning_rates(optimizer, model)
    gradients(model)
    before, grads = weights(model), {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    for name, lr in (("1.weight", 0.5 * PHI), ("2.weight", 0.01 * PHI), ("1.bias", 0.5), ("2.bias", 0.01)):
        assert torch.allclose(weights(model)[name], before[name] - lr * grads[name], rtol=0, atol=1e-6), name
    assert torch.equal(weights(model)["0.weight"], before["0.weight"]), "no optimizer holds it"


def test_schedulers_keep_working() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=1.0)
    byteback.scale_learning_rates(optimizer, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it thinks that step() was replaced or called out of order
        for lr in (1.0, 0.1, 0.01):
            model.zero_grad()
            gradients(model)
            before, gradient = model[1].weight.detach().clone(), model[1].weight.grad.clone()
            optimizer.step()
            scheduler.step()
            assert torch.allclose(model[1].weight, before - lr * PHI * gradient, rtol=0, atol=1e-6)


def test_gradient_accumulation_is_one_iteration_and_one_scaled_step() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    byteback.scale_learning_rates(optimizer, model)
    images = torch.randn(3, 2, 2, 6, 6)
    for _ in range(2):
        optimizer.zero_grad()
        for micro_batch in images:
            model(micro_batch).square().mean().backward()
        before, gradient = model[1].weight.detach().clone(), model[1].weight.grad.clone()
        optimizer.step()
        assert torch.allclose(model[1].weight, before - 0.1 * PHI * gradient, rtol=0, atol=1e-6)
    assert int(model[1].quantizers.iteration) == 2, "an iteration is an optimizer step"
    assert int(model[1].quantizers.count) == 6, "but no two micro-batches share their noise"


def test_without_a_hook_every_backward_pass_is_an_iteration() -> None:
    model = network(phi=None)
    for _ in range(3):
        gradients(model)
    assert int(model[1].quantizers.iteration) == int(model[1].quantizers.count) == 3


def test_lbfgs_steps_through_its_closure() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    byteback.scale_learning_rates(optimizer, model)
    images, before = torch.randn(2, 2, 6, 6), weights(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(images).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    assert all(bool(value.isfinite().all()) for value in weights(model).values())
    assert not torch.equal(weights(model)["1.weight"], before["1.weight"])
    assert int(model[1].quantizers.iteration) == 2


def test_a_step_with_a_closure_is_scaled_from_the_first_one_on() -> None:
    """The closure makes the gradients, so before the step there are none yet."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    byteback.scale_learning_rates(optimizer, model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        gradients(model)
        return torch.zeros(())

    for step in range(2):
        optimizer.zero_grad()
        before = model[1].weight.detach().clone()
        optimizer.step(closure)
        expected = before - 0.1 * PHI * model[1].weight.grad
        assert torch.allclose(model[1].weight, expected, rtol=0, atol=1e-6), f"step {step}"


def test_the_optimizers_state_dict_goes_round() -> None:
    build = OPTIMIZERS["sgd-momentum-decay-nesterov"]
    model = network()
    optimizer = build(model.parameters())
    plain_keys = set(optimizer.state_dict())
    byteback.scale_learning_rates(optimizer, model)
    gradients(model)
    optimizer.step()
    assert set(optimizer.state_dict()) == plain_keys

    twin = copy.deepcopy(model)
    its_optimizer = build(twin.parameters())
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    byteback.scale_learning_rates(its_optimizer, twin)
    for side, owner in ((model, optimizer), (twin, its_optimizer)):
        gradients(side, seed=5)
        owner.step()
    assert all(torch.equal(value, weights(twin)[name]) for name, value in weights(model).items())


def test_a_layer_switched_to_float_learns_at_its_full_rate() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaling = byteback.scale_learning_rates(optimizer, model)
    gradients(model)
    assert scaling.factors() == {"1": PHI, "2": PHI}
    byteback.enabled(model, False)
    assert scaling.factors() == {"1": 1.0, "2": 1.0}
