# SPDX-License-Identifier: Apache-2.0
"""Readers of one activation add their gradients among themselves, with autograd's bits, whatever else happens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import byteback
from byteback.nn.fused import shared_gradients, step
from byteback.nn.fused.shared_gradients import SharedGradient


class Residual(nn.Module):
    """A ResNet block, with a shortcut of its own if it has a stride."""

    def __init__(self, c: int, k: int, stride: int, act: bool = True) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(c, k, 1, stride, bias=False), nn.BatchNorm2d(k)
        self.conv2, self.norm2 = nn.Conv2d(k, k, 3, 1, 1, bias=False), nn.BatchNorm2d(k)
        self.down = nn.Sequential(nn.Conv2d(c, k, 1, stride, bias=False), nn.BatchNorm2d(k)) if stride > 1 else None
        self.act, self.detaches = act, False

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.down is None else self.down(x)
        out = F.relu(self.norm1(self.conv1(x)))
        if self.detaches:
            out = out.detach()
        out = self.norm2(self.conv2(out)) + skip
        return F.relu(out) if self.act else out


class Net(nn.Module):
    """Its `seen` are the activations between the blocks, if it `keeps` them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.body = nn.ModuleList(
            [Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 32, 1), Residual(32, 32, 1, act=False)]
        )
        self.head = nn.Linear(32, 5)
        self.seen: list[Tensor] = []
        self.run: Callable[..., Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [F.relu(self.norm(self.stem(x)))]
        for block in self.body:
            self.seen.append(self.run(block, self.seen[-1]))
        return self.head(self.seen[-1].mean((2, 3)))


IMAGES = torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(3))


def prepared(recipe: byteback.Recipe | None = None) -> Any:
    torch.manual_seed(7)
    return byteback.prepare(Net(), recipe or byteback.UnifiedInt8())


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For each gradient that a block has given for a shared activation: whether it waits."""
    seen: list[bool] = []
    original = SharedGradient.give

    def give(self: SharedGradient, ctx: Any, grad: Tensor, mask: Tensor | None = None) -> Tensor | None:
        result = original(self, ctx, grad, mask)
        if len(self._readers) > 1:
            seen.append(result is None)
        assert all(state.waiting is not None for state in self._passes.values())
        return result

    monkeypatch.setattr(SharedGradient, "give", give)
    yield seen


def both(run: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, recipe: byteback.Recipe | None = None) -> Any:
    """The results of `run` with the sums of autograd and with ours."""
    model = prepared(recipe)
    results = []
    for enabled in (False, True):
        monkeypatch.setattr(shared_gradients, "enabled", enabled)
        results.append(run(copy.deepcopy(model)))
    return results


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


def same(left: Any, right: Any) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def trained(model: Any) -> list[Tensor]:
    for _ in range(3):
        model.zero_grad()
        model(IMAGES).square().sum().backward()
    return gradients(model)


@pytest.mark.parametrize("recipe", [byteback.UnifiedInt8(), byteback.DistributionAdaptiveInt8(), byteback.PlainInt8()])
@pytest.mark.parametrize("stepped", [True, False])
def test_bits_are_those_of_autograd(
    recipe: byteback.Recipe, stepped: bool, sums: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "enabled", stepped)
    same(*both(trained, monkeypatch, recipe))
    # Four pairs of readers in each of three steps, first without our sums.
    assert sums == [False] * 24 + [True, False] * 12


def test_hooks_see_the_whole_sum(sums: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        seen: list[Tensor] = []
        output = model(IMAGES)
        for activation in model.seen:
            activation.register_hook(lambda g: seen.append(g.clone()))
            activation.register_hook(lambda g: g * 2)
            activation.retain_grad()
        output.square().sum().backward()
        return seen + [activation.grad for activation in model.seen] + gradients(model)

    same(*both(run, monkeypatch))
    assert True in sums


def test_gradients_of_activations(sums: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        loss = model(IMAGES).square().sum()
        made = list(torch.autograd.grad(loss, [model.seen[2], model.seen[0]], retain_graph=True))
        made += torch.autograd.grad(loss, [model.body[1].conv2.weight], retain_graph=True)
        # The second of these passes has no use for the gradient of what the block reads.
        made += torch.autograd.grad(loss, [model.body[3].norm2.weight], retain_graph=True)
        return made + list(torch.autograd.grad(loss, list(model.parameters())))

    same(*both(run, monkeypatch))
    assert True in sums


def test_a_pass_that_reaches_one_reader(sums: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """An auxiliary loss in the main branch: the add does not run."""

    def run(model: Any) -> list[Tensor]:
        inner: list[Tensor] = []
        handle = model.body[2].conv2.register_forward_pre_hook(lambda module, args: inner.append(args[0]))
        output = model(IMAGES)
        handle.remove()
        inner[0].square().sum().backward(retain_graph=True)
        (output.square().sum() + inner[0].sum()).backward()
        return gradients(model)

    same(*both(run, monkeypatch))
    assert True in sums


def test_a_branch_that_is_detached(sums: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        model.body[2].detaches = True
        model(IMAGES).square().sum().backward()
        return gradients(model)

    same(*both(run, monkeypatch))
    assert sums[len(sums) // 2 :].count(True) == 3  # the first convolution of the detached branch never runs


def test_backward_twice(sums: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        loss = model(IMAGES).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    same(*both(run, monkeypatch))
    assert sums.count(True) == 8


def test_a_pass_that_fails(sums: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits when a hook raises is not part of the next pass."""

    def run(model: Any) -> list[Tensor]:
        inner: list[Tensor] = []
        handle = model.body[2].conv2.register_forward_pre_hook(lambda module, args: inner.append(args[0]))
        loss = model(IMAGES).square().sum()
        handle.remove()

        def fail(g: Tensor) -> None:
            raise ValueError("not now")

        failing = inner[0].register_hook(fail)
        with pytest.raises(ValueError, match="not now"):
            loss.backward(retain_graph=True)
        failing.remove()
        model.zero_grad()
        loss.backward()
        return gradients(model)

    same(*both(run, monkeypatch))


def test_micro_batches(sums: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        losses = [model(part).square().sum() for part in IMAGES.chunk(2)]
        for loss in losses:
            loss.backward()
        return gradients(model)

    same(*both(run, monkeypatch))
    assert sums.count(True) == 8


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool, sums: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        model.run = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)
        model(IMAGES).square().sum().backward()
        return gradients(model)

    same(*both(run, monkeypatch))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_all_blocks(reentrant: bool, sums: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        output = checkpoint(lambda x: model(x), IMAGES.clone().requires_grad_(), use_reentrant=reentrant)
        output.square().sum().backward()  # type: ignore[union-attr]
        return gradients(model)

    same(*both(run, monkeypatch))
    assert True in sums


def test_create_graph_leaves_nothing_waiting(sums: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        loss = model(IMAGES).square().sum()
        made = torch.autograd.grad(loss, [model.seen[0], *model.parameters()], create_graph=True)
        with pytest.raises(RuntimeError, match="differentiated a second time"):
            torch.autograd.grad(made[0].sum(), [model.stem.weight])
        return [g.detach() for g in made]

    same(*both(run, monkeypatch))
    assert True not in sums


def test_other_readers_are_added_by_autograd(sums: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        output = model(IMAGES)
        (output.square().sum() + model.seen[2].sum() + F.avg_pool2d(model.seen[0], 2).square().sum()).backward()
        return gradients(model)

    for left, right in zip(*both(run, monkeypatch), strict=True):
        torch.testing.assert_close(left, right)
    assert True in sums


def test_three_readers_in_the_order_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two convolutions read what the block adds, and one block adds its own input."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
            self.convs = nn.ModuleList(nn.Conv2d(16, 16, 1, bias=False) for _ in range(3))
            self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.norm(self.stem(x)))
            a = F.relu(self.norms[0](self.convs[0](x)))
            b = F.relu(self.norms[1](self.convs[1](x)) + x)
            return F.relu(self.norms[2](self.convs[2](a)) + x) * b

    torch.manual_seed(7)
    model, results = byteback.prepare(Three(), byteback.UnifiedInt8()), []
    for enabled in (False, True):
        monkeypatch.setattr(shared_gradients, "enabled", enabled)
        one = copy.deepcopy(model)
        one(IMAGES).square().sum().backward()
        results.append(gradients(one))
    same(*results)


def test_writing_to_an_activation_ends_the_sharing(sums: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        model.run = lambda block, x: block(x.mul_(2.0))
        model(IMAGES).square().sum().backward()
        return gradients(model)

    same(*both(run, monkeypatch))


def test_distributed(tmp_path: Any, sums: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:

        def run(model: Any) -> list[Tensor]:
            whole = DistributedDataParallel(model)
            for _ in range(2):
                whole(IMAGES).square().sum().backward()
            return gradients(model)

        same(*both(run, monkeypatch))
    finally:
        dist.destroy_process_group()
    assert True in sums


def test_compiled_autograd_adds_itself(sums: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
            model(IMAGES).square().sum().backward()
        return gradients(model)

    same(*both(run, monkeypatch))
    assert True not in sums


def test_a_graph_frees_what_it_held() -> None:
    model = prepared()
    loss = model(IMAGES).square().sum()
    node = model.seen[0].grad_fn
    assert node is not None
    shared = node.metadata["byteback_shared_gradient"][0]
    assert len(shared._readers) == 2
    loss.backward()
    assert shared._passes == {}
    del loss, node
    model.seen.clear()
    assert all(ref() is None for ref in shared._readers)
