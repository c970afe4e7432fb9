# SPDX-License-Identifier: Apache-2.0
"""A step that is dropped (on_nonfinite="skip") or refused (NonFiniteError) leaves no trace in the model."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import byteback
from small_blocks import Net

NAN = float("nan")
# What names the noise goes on, and what was met stays counted.
GOES_ON = ("quantizers.count", "quantizers.nonfinite")


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


def network(policy: str, norm: Callable[[int], nn.Module] = nn.BatchNorm2d, fuse: bool = True, **options: Any) -> nn.Module:
    torch.manual_seed(5)
    recipe = byteback.UnifiedInt8(on_nonfinite=policy, strict=True, **options)
    return byteback.prepare(Net(norm=norm), recipe, fuse=fuse)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items() if not key.endswith(GOES_ON)}


def changed(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    now = state(model)
    return [key for key, value in before.items() if not torch.equal(now[key], value)]


class Trainer:
    """A model, its optimizer and the hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.scaling = byteback.scale_learning_rates(self.optimizer, model)

    def step(self, *batches: Tensor, scale: float = 1.0) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.optimizer.zero_grad()
            for batch in batches:
                (self.model(batch).square().mean() * scale).backward()
            self.optimizer.step()


NORMS = {
    "batch": nn.BatchNorm2d,
    "cumulative": lambda channels: nn.BatchNorm2d(channels, momentum=None),
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True, track_running_stats=True),
    "sync": nn.SyncBatchNorm,  # on the CPU it takes the batch of this process
}


# ---- on_nonfinite="skip" -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("norm", [*NORMS])
@pytest.mark.parametrize("bad", [NAN, float("inf")], ids=["nan", "inf"])
def test_a_dropped_step_leaves_no_trace(bad: float, norm: str, fuse: bool) -> None:
    trainer = Trainer(network("skip", NORMS[norm], fuse))
    for seed in range(2):
        trainer.step(images(seed))
    before = state(trainer.model)
    trainer.step(images(2, bad))
    assert trainer.scaling.skipped == 1
    assert not changed(trainer.model, before)
    trainer.step(images(3))
    after = changed(trainer.model, before)
    assert "norm.running_mean" in after and "first.conv1.quantizers.input.tracked" in after
    assert all(bool(value.isfinite().all()) for value in state(trainer.model).values())


def test_a_run_with_a_bad_batch_is_the_run_without_it() -> None:
    """Without noise, which has gone on, every bit is the same."""
    nearest = byteback.TensorRule(byteback.DirectionSensitive(period=2))
    with_it, without = (Trainer(network("skip", grad_output=nearest)) for _ in range(2))
    for seed in range(6):
        if seed == 3:
            with_it.step(images(9, NAN))
        for trainer in (with_it, without):
            trainer.step(images(seed))
    assert with_it.scaling.skipped == 1
    assert not changed(with_it.model, state(without.model))


def test_nan_that_comes_only_in_backward() -> None:
    trainer = Trainer(network("skip"))
    trainer.step(images(0))
    before = state(trainer.model)
    trainer.step(images(1), scale=float("inf"))
    assert trainer.scaling.skipped == 1 and not changed(trainer.model, before)


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_step_of_several_batches_is_dropped_whole(where: int) -> None:
    trainer = Trainer(network("skip"))
    trainer.step(images(0))
    before = state(trainer.model)
    batches = [images(seed) for seed in (1, 2, 3)]
    batches[where] = images(4, NAN)
    trainer.step(*batches)
    assert trainer.scaling.skipped == 1 and not changed(trainer.model, before)


def test_a_closure_is_dropped_whole() -> None:
    trainer = Trainer(network("skip"))
    trainer.step(images(0))
    before = state(trainer.model)

    def closure() -> Tensor:
        trainer.optimizer.zero_grad()
        loss: Tensor = trainer.model(images(1, NAN)).square().mean()
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match="dropped"):
        trainer.optimizer.step(closure)
    assert not changed(trainer.model, before)


def test_only_the_bad_step_goes_back() -> None:
    """Forwards in training mode without a gradient, as one that calibrates norms, belong to no step."""
    trainer = Trainer(network("skip"))
    trainer.step(images(0))
    with torch.no_grad():
        trainer.model(images(1))
    before = state(trainer.model)
    trainer.step(images(2, NAN))
    assert not changed(trainer.model, before)


def test_nan_is_dealt_with_once() -> None:
    """What the hooks have read does not come back with what is put back, or every step would be dropped from then on."""
    trainer = Trainer(network("skip"))
    trainer.step(images(0))
    with torch.no_grad():
        trainer.model(images(1, NAN))
    for seed in (2, 3, 4):
        trainer.step(images(seed))
    assert trainer.scaling.skipped == 1


def test_weights_that_were_loaded_within_a_step_stay() -> None:
    trainer, other = Trainer(network("skip")), Trainer(network("skip"))
    other.step(images(5))
    trainer.model(images(0))  # a look at a batch, without a step
    trainer.model.load_state_dict(other.model.state_dict())
    before = state(trainer.model)
    trainer.step(images(2, NAN))
    assert not changed(trainer.model, before)


def test_buffers_of_the_users_own_go_back_too() -> None:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("written", torch.zeros(4))
            self.register_buffer("replaced", torch.zeros(4))
            self.register_buffer("hidden", torch.zeros(4), persistent=False)
            self.register_buffer("absent", None)

        def forward(self, x: Tensor) -> Tensor:
            seen = x.detach().mean((0, 2, 3))[:1]
            self.written.add_(seen)
            self.hidden.add_(seen)
            self.replaced = self.replaced + seen
            return x

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), Queue(), nn.Conv2d(8, 4, 3))
    trainer = Trainer(byteback.prepare(net, byteback.PlainInt8(on_nonfinite="skip", strict=True)))
    trainer.step(images(0))
    before = {name: buffer.clone() for name, buffer in net[1].named_buffers()}
    trainer.step(images(1, NAN))
    assert all(torch.equal(value, before[name]) for name, value in net[1].named_buffers())
    trainer.step(images(2))
    assert not any(torch.equal(value, before[name]) for name, value in net[1].named_buffers())


class Around(nn.Module):
    """A network of which only a part is prepared."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))
        self.body = network(policy)
        self.head = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.stem(x)))
        return out


def test_norms_around_the_prepared_part_go_back_where_the_hooks_know_the_whole() -> None:
    trainer = Trainer(Around("skip"))
    trainer.step(images(0))
    before = state(trainer.model)
    trainer.step(images(1, NAN))
    assert trainer.scaling.skipped == 1 and not changed(trainer.model, before)


def test_layers_that_were_built_by_hand() -> None:
    torch.manual_seed(0)
    recipe = byteback.PlainInt8(on_nonfinite="skip", strict=True)
    net = nn.Sequential(nn.BatchNorm2d(3), byteback.Int8Conv2d(3, 8, 3, recipe=recipe), nn.BatchNorm2d(8))
    trainer = Trainer(net)
    trainer.step(images(0))
    before = state(net)
    trainer.step(images(1, NAN))
    assert trainer.scaling.skipped == 1 and not changed(net, before)


def test_hooks_that_are_removed_leave_none_behind() -> None:
    model = Around("skip")
    scaling = byteback.scale_learning_rates(SGD(model.parameters(), lr=0.1), model)
    scaling.remove()
    assert not model._forward_pre_hooks and not model._forward_hooks
    assert model.body._forward_pre_hooks


# ---- on_nonfinite="raise" ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooked", [True, False], ids=["hooked", "alone"])
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("norm", [*NORMS])
def test_a_refused_forward_leaves_no_trace(norm: str, fuse: bool, hooked: bool) -> None:
    model = network("raise", NORMS[norm], fuse)
    if hooked:
        Trainer(model).step(images(0))
    else:
        model(images(0)).sum().backward()
    before = state(model)
    with pytest.raises(byteback.NonFiniteError, match="input holds"):
        model(images(1, NAN))
    assert not changed(model, before)
    model(images(2))
    assert "norm.running_var" in changed(model, before)


def test_nan_in_the_middle_of_the_network() -> None:
    model = network("raise")
    model(images(0)).sum().backward()
    before = state(model)
    handle = model.first.register_forward_hook(lambda module, args, output: output * NAN)
    with pytest.raises(byteback.NonFiniteError, match="down: input"):
        model(images(1))
    assert not changed(model, before), "the layers before it had moved"
    handle.remove()


@pytest.mark.parametrize("hooked", [True, False], ids=["hooked", "alone"])
def test_a_refused_backward_leaves_no_trace(hooked: bool) -> None:
    model = network("raise")
    if hooked:
        Trainer(model).step(images(0))
    else:
        model(images(0)).sum().backward()
    before = state(model)
    loss = model(images(1)).square().mean()
    with pytest.raises(byteback.NonFiniteError, match="grad_output"):
        (loss * NAN).backward()
    assert not changed(model, before)


def test_what_the_other_ranks_have_yet_to_hear_goes_back_too() -> None:
    """`unshared` is no buffer."""
    model = network("raise", observe_every=1)
    model(images(0)).sum().backward()
    before = {name: module.unshared.clone() for name, module in model.named_modules() if hasattr(module, "unshared")}
    assert any(bool(unshared.any()) for unshared in before.values())
    with pytest.raises(byteback.NonFiniteError):
        (model(images(1)).square().mean() * NAN).backward()
    for name, unshared in before.items():
        assert torch.equal(model.get_submodule(name).unshared[:, :4], unshared[:, :4]), name


def test_what_went_well_before_stays() -> None:
    """A forward that is refused takes only itself back: the batches before it may still become a step."""
    trainer = Trainer(network("raise"))
    trainer.model(images(0)).sum().backward()
    before = state(trainer.model)
    with pytest.raises(byteback.NonFiniteError):
        trainer.model(images(1, NAN))
    assert not changed(trainer.model, before)
    trainer.optimizer.step()
    assert "first.conv1.weight" in changed(trainer.model, before)


def test_a_retry_where_the_error_is_handled_moves_the_model() -> None:
    model = network("raise")
    model(images(0)).sum().backward()
    before = state(model)
    try:
        model(images(1, NAN))
    except byteback.NonFiniteError:
        model(images(2))
    twin = network("raise")
    twin(images(0)).sum().backward()
    twin(images(2))
    assert not changed(model, state(twin)) and changed(model, before)


def test_nan_in_a_prediction_takes_nothing_back() -> None:
    model = network("raise")
    model(images(0)).sum().backward()
    before = state(model)
    with pytest.raises(byteback.NonFiniteError), torch.no_grad():
        model.eval()(images(1, NAN))
    assert not changed(model, before)
    model.requires_grad_(False)
    x = images(1).requires_grad_()
    with pytest.raises(byteback.NonFiniteError):
        (model(x).sum() * NAN).backward()
    assert not changed(model, before), "the training forward before it was a good one"


def test_a_weight_with_nan_is_a_refused_forward_too() -> None:
    model = network("skip")
    model(images(0)).sum().backward()
    with torch.no_grad():
        model.second.conv2.weight[0, 0, 0, 0] = NAN
    before = state(model)
    with pytest.raises(byteback.NonFiniteError, match=r"second\.conv2: weight"):
        model(images(1))
    before.pop("second.conv2.weight")
    assert not changed(model, before)


# ---- otherwise nothing is different -------------------------------------------------------------------------------------


def test_propagate_leaves_nan_to_its_user_as_pytorch_does() -> None:
    model = network("propagate")
    model(images(0, NAN))
    assert bool(model.norm.running_mean.isnan().any())


def test_copies_and_restored_models_have_a_memory_of_their_own() -> None:
    model = network("skip")
    model(images(0)).sum().backward()
    twin = copy.deepcopy(model)
    before = state(model)
    trainer = Trainer(twin)
    trainer.step(images(1))
    trainer.step(images(2, NAN))
    assert trainer.scaling.skipped == 1 and not changed(model, before)
    restored = byteback.restore(twin)
    assert not restored._forward_pre_hooks and not restored._forward_hooks
    assert not any("byteback" in name for name in vars(restored))


def test_a_model_that_nobody_needs_is_freed_at_once() -> None:
    model = network("raise")
    model(images(0)).sum().backward()
    with pytest.raises(byteback.NonFiniteError):
        model(images(1, NAN))
    alive = weakref.ref(model.first.conv1.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_an_interrupted_forward_does_not_stop_the_next_from_going_back() -> None:
    model = network("raise")
    model(images(0)).sum().backward()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.second.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(images(1))
    handle.remove()
    before = state(model)
    with pytest.raises(byteback.NonFiniteError):
        model(images(1, NAN))
    assert not changed(model, before)


@pytest.mark.parametrize("whole", [True, False], ids=["model", "function"])
def test_a_compiled_step_that_is_dropped_leaves_no_trace(whole: bool) -> None:
    torch._dynamo.reset()
    model = network("skip")
    trainer = Trainer(model)
    # Alone the hooks are compiled as functions of their own, within a function they are a part of its graph.
    run = model if whole else lambda x: model(x) * 1.0
    trainer.model = torch.compile(run, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
    trainer.step(images(0))
    before = state(model)
    trainer.step(images(1), images(2, NAN))
    trainer.step(images(3), scale=float("inf"))
    assert trainer.scaling.skipped == 2 and not changed(model, before)
    trainer.step(images(4))
    assert "norm.running_mean" in changed(model, before) and not bool(model.norm.running_mean.isnan().any())
    torch._dynamo.reset()
