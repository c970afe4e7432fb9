# SPDX-License-Identifier: Apache-2.0
"""scale_learning_rates: a factor on the step and not on the gradient, for every optimizer; and steps dropped for NaN.

The oracle is the definition: take the same optimizer's step without hooks, then w = w0 + φ (w - w0). A recipe whose rule
returns a fixed φ makes that checkable to the last bit.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import byteback
from byteback import lr_scaling

PHI = 0.3


@dataclass(frozen=True)
class Fixed(byteback.LearningRateRule):
    phi: float = PHI

    def factor(self, deviation: float) -> float:
        return self.phi


def network(phi: float | None = PHI, **recipe: Any) -> nn.Sequential:
    """Convolutions 1 and 2 are int8, 0 stays float."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1))
    rule = None if phi is None else Fixed(phi)
    return byteback.prepare(model, byteback.UnifiedInt8(learning_rate=rule, **recipe))


def gradients(model: nn.Module, seed: int = 0) -> None:
    """One backward pass, which also gives every int8 layer a deviation; then gradients that do not depend on noise."""
    draw = torch.Generator().manual_seed(seed)
    model(torch.randn(2, 2, 6, 6, generator=draw)).square().sum().backward()
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def shortened(before: Tensor, after: Tensor, phi: float) -> Tensor:
    return before + phi * (after - before)


def is_scaled(name: str) -> bool:
    return name in ("1.weight", "2.weight")


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd-momentum-decay-nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05, nesterov=True),
    "sgd-foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05, foreach=True),
    "sgd-fused": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05, fused=True),
    "adam": lambda p: Adam(p, lr=0.01, weight_decay=0.05),
    "adam-foreach": lambda p: Adam(p, lr=0.01, foreach=True),
    "adam-fused": lambda p: Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw-foreach": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw-fused": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
}


# ---- the factor ----


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
                parameter.data.copy_(shortened(before[name], parameter.detach(), PHI))
        for name, value in weights(model).items():
            assert torch.equal(value, weights(twin)[name]), f"{name} after step {step}"
            assert not torch.equal(value, before[name]), f"{name} did not move"


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


# ---- connecting ----


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


# ---- warnings ----


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


# ---- NaN and Inf ----


def step_of(model: nn.Module, optimizer: Optimizer, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    images = torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(3))
    (model(images).square().mean() * scale).backward()
    optimizer.step()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_skip_drops_the_whole_step(bad: float) -> None:
    model = network(on_nonfinite="skip")
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    scaling = byteback.scale_learning_rates(optimizer, model)
    step_of(model, optimizer)
    before = weights(model)
    momentum = {index: state["momentum_buffer"].clone() for index, state in optimizer.state_dict()["state"].items()}
    with pytest.warns(UserWarning, match="gradients were dropped"):
        step_of(model, optimizer, bad)
    assert scaling.skipped == 1
    assert all(parameter.grad is None for parameter in model.parameters()), "the float layers' gradients too"
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    for index, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["momentum_buffer"], momentum[index])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(model, optimizer)
    assert scaling.skipped == 1, "a good step after a bad one is taken"
    assert not torch.equal(model[1].weight, before["1.weight"])


def test_a_resumed_run_does_not_skip_again_what_was_skipped_before() -> None:
    """The count of bad tensors is in the checkpoint; loading it is no new bad tensor."""
    model = network(on_nonfinite="skip")
    optimizer = SGD(model.parameters(), lr=0.1)
    byteback.scale_learning_rates(optimizer, model)
    with pytest.warns(UserWarning, match="dropped"):
        step_of(model, optimizer, float("nan"))
    resumed = network(on_nonfinite="skip")
    its_optimizer = SGD(resumed.parameters(), lr=0.1)
    scaling = byteback.scale_learning_rates(its_optimizer, resumed)
    resumed.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step_of(resumed, its_optimizer)
    assert scaling.skipped == 0


def test_a_step_is_still_skipped_after_a_float_checkpoint_reset_the_count() -> None:
    model = network(on_nonfinite="skip")
    optimizer = SGD(model.parameters(), lr=0.1)
    scaling = byteback.scale_learning_rates(optimizer, model)
    with pytest.warns(UserWarning, match="dropped"):
        step_of(model, optimizer, float("nan"))
    model.load_state_dict(byteback.float_state_dict(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step_of(model, optimizer, float("nan"))
    assert scaling.skipped == 2
    assert all(bool(value.isfinite().all()) for value in weights(model).values())


def test_propagate_hands_nan_on() -> None:
    model = network(on_nonfinite="propagate")
    (model(torch.randn(2, 2, 6, 6)).square().mean() * float("inf")).backward()
    assert all(bool(layer.weight.grad.isnan().all()) for layer in (model[1], model[2]))


def test_raise_names_layer_and_role() -> None:
    model = network()
    with pytest.raises(byteback.NonFiniteError, match=r"2: grad_output holds \d+ NaN or Inf"):
        (model(torch.randn(2, 2, 6, 6)).square().mean() * float("nan")).backward()


# A script and not torch.multiprocessing: pytest imports this file in a way that a spawned process could not repeat.
RANK = """
    import sys, warnings, torch, byteback
    import torch.distributed as dist
    from torch import nn
    rank, file = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3))
    byteback.prepare(model, byteback.UnifiedInt8(on_nonfinite="skip", strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling = byteback.scale_learning_rates(optimizer, model)
    warnings.simplefilter("ignore")
    images = torch.randn(2, 2, 8, 8)
    moved = []
    for step in range(3):
        optimizer.zero_grad()
        bad = step == 1 and rank == 1
        (model(images).square().mean() * (float("nan") if bad else 1.0)).backward()
        if step == 0:
            grads = [torch.zeros_like(model[1].weight) for _ in range(2)]
            dist.all_gather(grads, model[1].weight.grad)
            close = torch.allclose(*grads, rtol=0.2, atol=0.02)
            print("noise", "shared" if torch.equal(*grads) else "own", "close" if close else "far")
        before = model[1].weight.detach().clone()
        optimizer.step()
        moved.append(not torch.equal(before, model[1].weight))
    print("moved", moved, "skipped", scaling.skipped)
    dist.destroy_process_group()
"""


def test_ranks_skip_together_and_draw_their_own_noise(tmp_path: Path) -> None:
    """Same weights, same images, and NaN on rank 1 only: both drop that step, and their gradients differ by noise alone."""
    if not torch.distributed.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    source = str(Path(lr_scaling.__file__).parents[1])
    header = f"import sys\nsys.path.insert(0, {source!r})\n"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", header + textwrap.dedent(RANK), str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, f"rank {rank}: {err}"
            assert out.splitlines() == ["noise own close", "moved [True, False, True] skipped 1"], f"rank {rank}"
    finally:
        for process in ranks:
            process.kill()
