# SPDX-License-Identifier: Apache-2.0
"""Where looks cost time NaN is flagged and read once per step: the same errors and the same model as where it raises at once.

The backend is the reference's, made to defer (tests/deferring.py). Its twin on the CPU raises at once and is the oracle.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import byteback
from byteback.nn import flags
from byteback.quantize import NONFINITE
from deferring import deferring
from small_blocks import Net
from watched_looks import watched

NAN = float("nan")
GOES_ON = ("quantizers.count", "quantizers.nonfinite")
FLAG_HANDLING = ("ops/refusals.py", "reference/deferred.py")  # clip rules look too, in the reference's own operations
RECIPES = ["plain-int8", "unified-int8", "distribution-adaptive-int8"]
ROLES = ["input", "weight", "grad_output"]
fused = pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors here are tiny; a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def images(seed: int, bad: float | None = None) -> Tensor:
    x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(seed))
    if bad is not None:
        x[1, 2, 3, 4] = bad
    return x


def network(policy: str = "raise", fuse: bool = True) -> nn.Module:
    """Without noise, which goes on after a refused step, every bit of a run can be compared."""
    torch.manual_seed(5)
    nearest = byteback.TensorRule(byteback.DirectionSensitive(period=2))
    return byteback.prepare(Net(), byteback.UnifiedInt8(on_nonfinite=policy, strict=True, grad_output=nearest), fuse=fuse)


def state(model: nn.Module) -> dict[str, Tensor]:
    kept = {key: value.clone() for key, value in model.state_dict().items() if not key.endswith(GOES_ON)}
    measured = {name: module.unshared[:, :NONFINITE] for name, module in model.named_modules() if hasattr(module, "unshared")}
    return kept | {f"{name}.unshared": value.clone() for name, value in measured.items()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    now = state(model)
    return [key for key, value in before.items() if not torch.equal(now[key], value)]


def flagged(model: nn.Module) -> bool:
    return any(bool(holder.unshared[:, NONFINITE].any()) for holder in flags.holders(flags.numerics_of(model)))


class Trainer:
    """A model and its optimizer, with the hooks or without."""

    def __init__(self, model: nn.Module, hooked: bool = True) -> None:
        self.model = model
        self.optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.scaling = byteback.scale_learning_rates(self.optimizer, model) if hooked else None

    def step(self, *batches: Tensor, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        for batch in batches:
            self.gradients(batch, scale)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a step was dropped
            self.optimizer.step()

    def gradients(self, batch: Tensor, scale: float = 1.0) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no optimizer is connected
            (self.model(batch).square().mean() * scale).backward()

    def momentum(self) -> list[Tensor]:
        return [value["momentum_buffer"].clone() for value in self.optimizer.state_dict()["state"].values()]


class Bad:
    """A step with NaN in one role: its batch and the factor of its loss; a weight is NaN until it is mended."""

    def __init__(self, model: nn.Module, role: str, seed: int = 9) -> None:
        self.weight, self.role = model.get_parameter("down.weight"), role
        self.kept = self.weight.detach().clone()
        self.batch = images(seed, NAN if role == "input" else None)
        self.scale = NAN if role == "grad_output" else 1.0
        if role == "weight":
            with torch.no_grad():
                self.weight[0, 0, 0, 0] = NAN

    def mend(self) -> None:
        with torch.no_grad():
            self.weight.copy_(self.kept)


def message_at_once(role: str, hooked: bool, fuse: bool = True, good: int = 2) -> str:
    """What the CPU says, where the error comes at once."""
    trainer = Trainer(network(fuse=fuse), hooked)
    for seed in range(good):
        trainer.step(images(seed))
    bad = Bad(trainer.model, role)
    with pytest.raises(byteback.NonFiniteError) as error:
        trainer.step(bad.batch, scale=bad.scale)
    return str(error.value)


# ---- finite steps ------------------------------------------------------------------------------------------------------


@fused
@pytest.mark.parametrize("recipe", RECIPES)
def test_finite_steps_have_the_bits_of_the_reference(recipe: str, fuse: bool) -> None:
    def trained() -> dict[str, Tensor]:
        torch.manual_seed(0)
        trainer = Trainer(byteback.prepare(Net(), recipe, fuse=fuse))
        for seed in range(12):
            trainer.step(images(seed))
        trainer.model.eval()
        with torch.no_grad():
            return {**state(trainer.model), "prediction": trainer.model(images(20))}

    expected = trained()
    with deferring():
        found = trained()
    assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []


@pytest.mark.parametrize(("policy", "looks"), [("raise", 1), ("skip", 1), ("propagate", 0)])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_step_takes_one_look_at_the_flags(policy: str, looks: int, batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with deferring():
        trainer = Trainer(network(policy))
        with watched(monkeypatch, also=FLAG_HANDLING) as seen:
            for seed in range(6):
                trainer.step(*(images(seed) for _ in range(batches)))
    assert seen.total() == 6 * looks, seen
    assert all("/nn/flags.py" in where for where in seen)


def test_without_hooks_each_forward_but_the_first_takes_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    with deferring():
        trainer = Trainer(network(), hooked=False)
        with watched(monkeypatch, also=FLAG_HANDLING) as seen:
            for seed in range(6):
                trainer.step(images(seed))
    assert seen.total() == 5, seen
    assert all("/nn/flags.py" in where for where in seen)


@pytest.mark.parametrize(("policy", "put_back"), [("raise", 1), ("skip", 2)])
def test_what_has_to_be_put_back_is_found_in_one_look(policy: str, put_back: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where a step is refused or dropped. A dropped one is put back twice: before the optimizer's step and after it."""
    with deferring():
        trainer = Trainer(network(policy))
        trainer.step(images(0))
        with watched(monkeypatch, also=FLAG_HANDLING) as seen:
            if policy == "raise":
                with pytest.raises(byteback.NonFiniteError):
                    trainer.step(images(1, NAN))
            else:
                trainer.step(images(1, NAN))
    assert seen.total() == 1 + put_back, seen


# ---- on_nonfinite="raise" with the hooks -------------------------------------------------------------------------------


@fused
@pytest.mark.parametrize("role", ROLES)
def test_the_hook_refuses_the_step_with_the_error_of_the_cpu(role: str, fuse: bool) -> None:
    expected = message_at_once(role, hooked=True, fuse=fuse)
    assert f": {role} holds" in expected and "at iteration 2;" in expected
    with deferring():
        trainer = Trainer(network(fuse=fuse))
        for seed in range(2):
            trainer.step(images(seed))
        bad = Bad(trainer.model, role)
        before, momentum = state(trainer.model), trainer.momentum()
        trainer.gradients(bad.batch, bad.scale)
        with pytest.raises(byteback.NonFiniteError) as error:
            trainer.optimizer.step()
        bad.mend()
        before["down.weight"] = bad.kept
        assert str(error.value) == expected
        assert not changed(trainer.model, before) and not flagged(trainer.model)
        assert all(map(torch.equal, trainer.momentum(), momentum))
        assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize("role", ROLES)
def test_the_run_goes_on_as_if_the_refused_step_had_not_been(role: str) -> None:
    with deferring():
        with_it, without = Trainer(network()), Trainer(network())
        for seed in range(6):
            if seed == 3:
                bad = Bad(with_it.model, role)
                with pytest.raises(byteback.NonFiniteError, match="at iteration 3;"):
                    with_it.step(bad.batch, scale=bad.scale)
                bad.mend()
            for trainer in (with_it, without):
                trainer.step(images(seed))
        assert not changed(with_it.model, state(without.model))


@pytest.mark.parametrize("where", [0, 1])
def test_a_step_of_two_batches_is_refused_whole(where: int) -> None:
    with deferring():
        trainer = Trainer(network())
        trainer.step(images(0))
        before = state(trainer.model)
        batches = [images(1), images(2)]
        batches[where] = images(3, NAN)
        with pytest.raises(byteback.NonFiniteError, match=r"input holds \d+ NaN or Inf values at iteration 1;"):
            trainer.step(*batches)
        assert not changed(trainer.model, before)


def test_a_closure_is_refused_too() -> None:
    with deferring():
        trainer = Trainer(network())
        trainer.step(images(0))
        before = state(trainer.model)

        def closure() -> Tensor:
            trainer.optimizer.zero_grad()
            loss: Tensor = trainer.model(images(1, NAN)).square().mean()
            loss.backward()
            return loss

        with pytest.raises(byteback.NonFiniteError, match="input holds"):
            trainer.optimizer.step(closure)
        assert not changed(trainer.model, before)
        trainer.step(images(2))
        assert changed(trainer.model, before)


def test_the_first_of_several_is_named() -> None:
    """NaN that goes around an int8 layer, by a residual connection, is met again behind it."""
    with deferring():
        trainer = Trainer(network())
        trainer.gradients(images(0, NAN))
        with pytest.raises(byteback.NonFiniteError) as error:
            trainer.optimizer.step()
    at_once = Trainer(network())
    with pytest.raises(byteback.NonFiniteError) as expected:
        at_once.gradients(images(0, NAN))
    assert str(error.value) == str(expected.value)


def test_hooks_that_are_removed_in_the_middle_of_a_step_leave_it_to_the_next_forward() -> None:
    with deferring():
        trainer = Trainer(network())
        trainer.step(images(0))
        before = state(trainer.model)
        trainer.gradients(images(1, NAN))
        assert trainer.scaling is not None
        trainer.scaling.remove()
        with pytest.raises(byteback.NonFiniteError, match="input holds"):
            trainer.model(images(2))
        assert not changed(trainer.model, before)


def test_a_forward_without_gradient_is_not_left_to_the_hook() -> None:
    """It belongs to no step; what it has moved goes back alone."""
    with deferring():
        trainer = Trainer(network())
        trainer.step(images(0))
        before = state(trainer.model)
        with torch.no_grad():
            trainer.model(images(1, NAN))
        with pytest.raises(byteback.NonFiniteError, match="input holds"):
            trainer.model(images(2))
        assert not changed(trainer.model, before)


def test_weights_that_are_loaded_clear_the_flags() -> None:
    with deferring():
        source, trainer, twin = (Trainer(network()) for _ in range(3))
        source.step(images(0))
        trainer.gradients(images(1, NAN))
        assert flagged(trainer.model)
        for each in (trainer, twin):
            each.model.load_state_dict(source.model.state_dict())
            assert not flagged(each.model)
            each.step(images(2))
        assert not changed(trainer.model, state(twin.model))


# ---- on_nonfinite="raise" without hooks --------------------------------------------------------------------------------


@fused
@pytest.mark.parametrize("role", ROLES)
def test_without_hooks_the_next_forward_refuses_the_step_before_it(role: str, fuse: bool) -> None:
    expected = message_at_once(role, hooked=False, fuse=fuse)
    assert f": {role} holds" in expected and "at iteration 2;" in expected
    with deferring():
        trainer, twin = (Trainer(network(fuse=fuse), hooked=False) for _ in range(2))
        for seed in range(2):
            trainer.step(images(seed))
            twin.step(images(seed))
        bad = Bad(trainer.model, role)
        before = state(trainer.model)
        trainer.gradients(bad.batch, bad.scale)
        with pytest.raises(byteback.NonFiniteError) as error:
            trainer.model(images(7))
        bad.mend()
        before["down.weight"] = bad.kept
        assert str(error.value).startswith(expected) and "scale_learning_rates" in str(error.value)
        assert not changed(trainer.model, before)
        for each in (trainer, twin):
            each.step(images(2))
        assert not changed(trainer.model, state(twin.model))


def test_without_hooks_the_second_batch_finds_nan_of_the_first() -> None:
    with deferring():
        trainer = Trainer(network(), hooked=False)
        trainer.step(images(0))
        before = state(trainer.model)
        with pytest.raises(byteback.NonFiniteError, match=r"input holds \d+ NaN or Inf values at iteration 1;"):
            trainer.step(images(1, NAN), images(2))
        assert not changed(trainer.model, before)


def test_the_prediction_after_the_last_step_finds_it_too() -> None:
    with deferring():
        trainer = Trainer(network(), hooked=False)
        trainer.step(images(0))
        before = state(trainer.model)
        trainer.gradients(images(1, NAN))
        trainer.model.eval()
        with torch.no_grad(), pytest.raises(byteback.NonFiniteError, match="input holds"):
            trainer.model(images(2))
        assert not changed(trainer.model, before)
        with torch.no_grad():
            assert trainer.model(images(2)).isfinite().all()


def test_a_gradient_of_a_prediction_is_refused_and_takes_nothing_back() -> None:
    with deferring():
        trainer = Trainer(network(), hooked=False)
        trainer.step(images(0))
        before = state(trainer.model)
        trainer.model.eval()
        (trainer.model(images(1)).sum() * NAN).backward()
        with pytest.raises(byteback.NonFiniteError, match="grad_output holds"):
            trainer.model(images(2))
        before = {key: value for key, value in before.items() if not key.endswith("iteration")}
        assert not changed(trainer.model, before)


# ---- the other policies, and outside training --------------------------------------------------------------------------


@fused
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_skip_drops_the_step_without_a_trace(role: str, batches: int, fuse: bool) -> None:
    with deferring():
        with_it, without = (Trainer(network("skip", fuse)) for _ in range(2))
        for seed in range(6):
            if seed == 3:
                before, momentum, bad = state(with_it.model), with_it.momentum(), Bad(with_it.model, role)
                with_it.step(*(images(8), bad.batch)[-batches:], scale=bad.scale)
                assert not changed(with_it.model, before)
                assert all(map(torch.equal, with_it.momentum(), momentum))
            for trainer in (with_it, without):
                trainer.step(images(seed))
        assert with_it.scaling is not None and with_it.scaling.skipped == 1
        assert not changed(with_it.model, state(without.model))


def test_a_weight_with_nan_is_refused_under_skip_too() -> None:
    with deferring():
        trainer = Trainer(network("skip"))
        trainer.step(images(0))
        bad = Bad(trainer.model, "weight")
        with pytest.raises(byteback.NonFiniteError, match=r"^down: weight holds 1 NaN or Inf values at iteration 1;"):
            trainer.step(bad.batch)
        assert trainer.scaling is not None and trainer.scaling.skipped == 0


@fused
@pytest.mark.parametrize("role", ROLES)
def test_propagate_hands_the_same_nan_on(role: str, fuse: bool) -> None:
    def gradients() -> dict[str, Any]:
        trainer = Trainer(network("propagate", fuse))
        trainer.step(images(0))
        bad = Bad(trainer.model, role)
        trainer.gradients(bad.batch, bad.scale)
        grads = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
        return {**state(trainer.model), **grads, "counts": [int(n.nonfinite) for n in flags.numerics_of(trainer.model)]}

    expected = gradients()
    with deferring():
        found = gradients()
    assert found.pop("counts") == expected.pop("counts")
    assert [key for key in expected if not torch.allclose(found[key], expected[key], 0.0, 0.0, equal_nan=True)] == []
    assert any(bool(value.isnan().any()) for value in expected.values())


@pytest.mark.parametrize("policy", ["raise", "skip", "propagate"])
@pytest.mark.parametrize("role", ["input", "weight"])
def test_a_prediction_from_nan_is_nan_and_no_error(role: str, policy: str) -> None:
    with deferring():
        trainer = Trainer(network(policy), hooked=False)
        trainer.step(images(0))
        trainer.model.eval()
        bad = Bad(trainer.model, role)
        with torch.no_grad():
            assert trainer.model(bad.batch).isnan().any()
        assert not flagged(trainer.model)


def test_the_hooks_refuse_a_compiled_step_too() -> None:
    """As on the CPU an error of a compiled graph puts no buffer back; the weights stay."""
    torch._dynamo.reset()
    with deferring():
        trainer = Trainer(network())
        model, trainer.model = trainer.model, torch.compile(trainer.model, backend="aot_eager", fullgraph=True)
        trainer.step(images(0))
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(byteback.NonFiniteError, match=r"input holds \d+ NaN or Inf values at iteration 1;"):
            trainer.step(images(1, NAN))
        assert all(map(torch.equal, model.parameters(), weights)) and not flagged(model)
    torch._dynamo.reset()
