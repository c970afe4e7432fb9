# SPDX-License-Identifier: Apache-2.0
"""A block's training step in one call for each direction gives the bits of the operators one by one, whatever comes up."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import byteback
from byteback.nn.fused import step
from byteback.ops.backends.cpu import library
from byteback.ops.backends.cpu.block_step import Site
from small_blocks import Residual

pytestmark = pytest.mark.skipif(library.native is None, reason="this build has no native library")

UNIFIED, ADAPTIVE = byteback.UnifiedInt8(), byteback.DistributionAdaptiveInt8()


class Net(nn.Module):
    """A stem, a depthwise and a pointwise convolution, a residual block, a shortcut with a norm, and a layer used twice."""

    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.deep, self.deep_norm = (
            nn.Conv2d(channels, channels, 3, 2, 1, groups=channels, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.wide, self.wide_norm = nn.Conv2d(channels, 2 * channels, 1, bias=False), nn.BatchNorm2d(2 * channels)
        self.block = Residual(2 * channels)
        self.twice, self.twice_norm = (
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * channels),
        )
        self.head = nn.Linear(2 * channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu6(self.deep_norm(self.deep(x)))
        x = self.block(self.wide_norm(self.wide(x)))
        for _ in range(2):
            x = F.relu(self.twice_norm(self.twice(x)))
        return self.head(x.mean((2, 3)))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which directions of which sites ran in one call, in order."""
    seen: list[str] = []
    for name in ("forward", "backward"):
        original = getattr(Site, name)

        def counted(self: Site, *args: Any, _name: str = name, _original: Any = original) -> Any:
            made = _original(self, *args)
            # A backward call that leaves the products to the operators has only begun.
            seen.append(_name if made is not None and (_name == "forward" or made[0]) else f"no {_name}")
            return made

        monkeypatch.setattr(Site, name, counted)
    return seen


def train(
    recipe: Any,
    *,
    in_one: bool,
    last: bool = True,
    steps: int = 13,
    hooked: bool = True,
    disturb: Callable[[int, nn.Module], None] | None = None,
    scale: Callable[[int], float] = lambda _: 1.0,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and everything that the model remembers after some steps."""
    monkeypatch.setattr(step, "enabled", in_one)
    torch.manual_seed(11)
    model = Net()
    if last:
        model = model.to(memory_format=torch.channels_last)
    byteback.prepare(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if hooked:
        byteback.scale_learning_rates(optimizer, model)
    losses = []
    for index in range(steps):
        if disturb is not None:
            disturb(index, model)
        draw = torch.Generator().manual_seed(index)
        loss = F.cross_entropy(model(torch.randn(4, 3, 9, 7, generator=draw)), torch.arange(4)) * scale(index)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def assert_same(*args: Any, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> None:
    losses, state = train(*args, in_one=True, monkeypatch=monkeypatch, **kwargs)
    expected, one_by_one = train(*args, in_one=False, monkeypatch=monkeypatch, **kwargs)
    assert losses == expected
    for name, tensor in state.items():
        assert torch.equal(tensor, one_by_one[name]), name


RECIPES = {
    "unified": UNIFIED,
    "adaptive": ADAPTIVE,
    "held clips": replace(UNIFIED, grad_output=replace(UNIFIED.grad_output, clip=byteback.DirectionSensitive(hold="clip"))),
    "always searched again": replace(
        UNIFIED, grad_output=replace(UNIFIED.grad_output, clip=byteback.DirectionSensitive(search_when_saturated=0.0))
    ),
    "narrow band": replace(UNIFIED, grad_output=replace(UNIFIED.grad_output, clip=byteback.DirectionSensitive(band=1.0))),
    "nearest": replace(UNIFIED, grad_output=replace(UNIFIED.grad_output, rounding="nearest")),
    "bfloat16 memory": replace(ADAPTIVE, norm_memory="bfloat16"),
    "float32 memory": replace(UNIFIED, norm_memory="float32"),
    "int8 residual": replace(ADAPTIVE, residual_memory="int8"),
    "bfloat16 stream": replace(UNIFIED, stream="bfloat16"),
    "bfloat16 stream and memory": replace(ADAPTIVE, stream="bfloat16", norm_memory="bfloat16"),
    "bfloat16 stream as it is": replace(UNIFIED, stream="bfloat16", norm_memory="float32"),
    "no shares": replace(ADAPTIVE, depthwise_shares=False),
    "strict": replace(UNIFIED, strict=True),
}


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "contiguous"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_it_has_the_bits_of_the_operators(
    recipe: byteback.Recipe, last: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same(recipe, last=last, monkeypatch=monkeypatch)
    assert calls.count("forward") > 20


@pytest.mark.parametrize("recipe", [UNIFIED, ADAPTIVE])
def test_most_steps_are_one_call_for_each_direction(
    recipe: byteback.Recipe, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six calls of int8 layers with a norm: in each of 13 steps but the two that measure (0 and 10) all run in one call."""
    assert_same(recipe, monkeypatch=monkeypatch)
    assert calls.count("forward") == 11 * 6
    assert calls.count("backward") == 11 * 6


def test_without_an_optimizer_the_backward_pass_counts_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(ADAPTIVE, hooked=False, monkeypatch=monkeypatch)


def test_a_gradient_that_outgrows_its_clip_is_quantized_again(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The clip becomes γ max|g|, in the same call; only the steps that measure (0 and 10) leave products to the operators."""
    assert_same(UNIFIED, scale=lambda index: 1.0 + 30.0 * (index in (3, 4, 8)), monkeypatch=monkeypatch)
    assert calls.count("backward") == 11 * 6


def _swap(index: int, model: nn.Module) -> None:
    """Puts other tensors in the place of parameters and buffers, with the same numbers."""
    if index == 2:
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    if index == 3:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    if index == 4:  # as strided tensors, which the native library does not read
        norm: Any = model.get_submodule("wide_norm")
        norm.running_mean = torch.stack([norm.running_mean, norm.running_mean], 1)[:, 0]


@pytest.mark.parametrize("recipe", [UNIFIED, ADAPTIVE])
def test_tensors_may_move(recipe: byteback.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    # The optimizer goes on with the old parameters; what is compared is the forward and backward passes.
    assert_same(recipe, disturb=_swap, hooked=False, monkeypatch=monkeypatch)


class _Elsewhere(torch.autograd.graph.saved_tensors_hooks):
    """Saved tensors are moved, as offloading does."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor.clone(), lambda tensor: tensor.clone())


@pytest.fixture
def _offloaded() -> Iterator[None]:
    with _Elsewhere():
        yield


@pytest.mark.usefixtures("_offloaded")
@pytest.mark.parametrize("recipe", [UNIFIED, ADAPTIVE])
def test_saved_tensors_may_move(recipe: byteback.Recipe, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(recipe, steps=4, monkeypatch=monkeypatch)
    assert "forward" in calls
    assert "backward" not in calls  # what comes back from elsewhere is checked by the operators


def _model(recipe: byteback.Recipe) -> nn.Module:
    torch.manual_seed(5)
    return byteback.prepare(Net(), recipe)


def _backward(model: nn.Module) -> None:
    model(torch.randn(4, 3, 9, 7, generator=torch.Generator().manual_seed(1))).square().sum().backward()


@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
@pytest.mark.parametrize("recipe", [UNIFIED, ADAPTIVE])
def test_nan_is_refused_as_by_the_operators(recipe: byteback.Recipe, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    messages, states = [], []
    for in_one in (True, False):
        monkeypatch.setattr(step, "enabled", in_one)
        model = _model(recipe)
        for _ in range(2):
            _backward(model)
        if where == "weight":
            model.get_submodule("wide").weight.data[0, 0] = torch.nan
        handle = None
        if where == "input":
            model.get_submodule("norm").weight.data[0] = torch.nan
        if where == "gradient":
            handle = model.get_submodule("head").register_full_backward_hook(lambda module, grads, _: (grads[0] * torch.nan,))
        with pytest.raises(byteback.NonFiniteError) as error:
            _backward(model)
        if handle is not None:
            handle.remove()
        messages.append(str(error.value))
        states.append(model.state_dict())
    assert messages[0] == messages[1]
    for name, tensor in states[0].items():
        assert torch.equal(tensor.nan_to_num(7.0), states[1][name].nan_to_num(7.0)), name


def test_a_path_that_changes_before_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    grads = []
    for in_one in (True, False):
        monkeypatch.setattr(step, "enabled", in_one)
        model = _model(UNIFIED)
        _backward(model)
        with byteback.path("generic"):
            loss = model(torch.randn(4, 3, 9, 7, generator=torch.Generator().manual_seed(2))).square().sum()
        loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*grads, strict=True))


def test_a_trained_model_can_be_copied_and_pickled() -> None:
    model = _model(UNIFIED)
    _backward(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not other.get_submodule("wide").int8_sites
        _backward(other)


def test_a_restored_model_has_no_sites() -> None:
    model = _model(UNIFIED)
    _backward(model)
    byteback.restore(model)
    assert not hasattr(model.get_submodule("wide"), "int8_sites")


def test_images_of_every_size_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_MOST_SITES", 3)
    model = _model(UNIFIED)
    for size in range(4, 14):
        model(torch.randn(2, 3, size, size)).sum().backward()
        assert len(model.get_submodule("wide").int8_sites) <= 3
