# SPDX-License-Identifier: Apache-2.0
"""Gradients between blocks with stream="bfloat16": rounded once, same bits however they travel, float32 to whoever looks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import byteback
from byteback import ops
from byteback.nn.fused import block as fused
from byteback.nn.fused import step
from byteback.nn.fused.sources import LazyActivation
from byteback.ops.backends import paths
from byteback.ops.contract.bfloat16 import to_bfloat16

BF16 = torch.bfloat16
IMAGES = torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(3))


class Bottleneck(nn.Module):
    early = False  # the shortcut is the first reader of x, and so the last one in backward

    def __init__(self, c: int, k: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(c, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, stride, 1, bias=False), nn.BatchNorm2d(8)
        self.conv3, self.norm3 = nn.Conv2d(8, k, 1, bias=False), nn.BatchNorm2d(k)
        self.down = nn.Sequential(nn.Conv2d(c, k, 1, stride, bias=False), nn.BatchNorm2d(k)) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x) if self.down is not None and self.early else x
        out = F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        out = self.norm3(self.conv3(out))
        if self.down is not None and not self.early:
            skip = self.down(x)
        return F.relu(out + skip)


class Net(nn.Module):
    """Its `seen` are the activations between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.body = nn.ModuleList([Bottleneck(16, 16, 1), Bottleneck(16, 32, 2), Bottleneck(32, 32, 1)])
        self.head = nn.Linear(32, 5)
        self.seen: list[Tensor] = []
        self.run: Callable[..., Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [F.relu(self.norm(self.stem(x)))]
        for block in self.body:
            self.seen.append(self.run(block, self.seen[-1]))
        return self.head(self.seen[-1].mean((2, 3)))


def prepared(recipe: Any = byteback.UnifiedInt8, **options: Any) -> Any:
    torch.manual_seed(7)
    return byteback.prepare(Net(), recipe(stream="bfloat16", **options))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


def same(left: Any, right: Any) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, bool]]:
    """For each gradient that a block returns: how it is stored, and whether it goes to a block without floats."""
    seen: list[tuple[torch.dtype, bool]] = []
    original = fused._for_autograd

    def watch(grad: Tensor | None, to_block: bool) -> Tensor | None:
        made = original(grad, to_block)
        if grad is not None:
            assert made is not None and made.dtype == torch.float32
            seen.append((grad.dtype, isinstance(made, LazyActivation)))
        return made

    monkeypatch.setattr(fused, "_for_autograd", watch)
    return seen


def both(run: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Compares the results of `run` where gradients travel as bfloat16, and where autograd gets all of them as floats."""
    model = prepared(**options)
    travelling = run(copy.deepcopy(model))
    with monkeypatch.context() as patch:
        patch.setattr(fused, "_for_autograd", lambda grad, _: None if grad is None else grad.float())
        same(travelling, run(copy.deepcopy(model)))


def trained(model: Any) -> list[Tensor]:
    for _ in range(3):
        model.zero_grad()
        model(IMAGES).square().sum().backward()
    return gradients(model)


def test_which_gradients_are_rounded(passed: list[tuple[torch.dtype, bool]]) -> None:
    model = prepared()
    model(IMAGES).square().sum().backward()
    # Of each bottleneck, the last first: conv3 (1x1) rounds, conv2 (3x3) does not, conv1 (1x1) does. The first conv1 adds
    # what waits. The gradient of the shortcut is a part of one that was rounded; its own is that of a stride.
    wide, small = (torch.float32, False), (BF16, True)
    bottleneck = [small, wide, small]
    assert passed == [*bottleneck, small, small, *bottleneck[1:], *bottleneck]


@pytest.mark.parametrize("stream", ["float32", "bfloat16"])
def test_float32_streams_round_nothing(stream: str, passed: list[tuple[torch.dtype, bool]]) -> None:
    torch.manual_seed(7)
    model = byteback.prepare(Net(), byteback.UnifiedInt8(stream=stream))
    if stream == "bfloat16":
        model.eval()  # norms with given statistics
    model(IMAGES).square().sum().backward()
    assert passed and all(entry == (torch.float32, False) for entry in passed)


def test_it_is_rounded_once_after_what_waits_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """By operators, whose steps can be seen: grad_input plus what waits, in float32, then rounded to nearest."""
    monkeypatch.setattr(step, "enabled", False)
    sums: list[Tensor] = []
    original = ops.pack_norm

    def watch(x: Tensor, *rest: Any) -> Any:
        if rest[-1] == "bfloat16":
            sums.append(x.clone())
        return original(x, *rest)

    monkeypatch.setattr(ops, "pack_norm", watch)
    added: list[Tensor] = []
    add = ops.add_waiting

    def watch_add(*arguments: Any) -> Tensor:
        added.append(add(*arguments))
        return added[-1]

    monkeypatch.setattr(ops, "add_waiting", watch_add)
    model, seen = prepared(), []
    output = model(IMAGES)
    model.seen[2].register_hook(lambda g: seen.append(g.clone()))
    output.square().sum().backward()
    (g,), whole = seen, added[0]
    assert any(torch.equal(whole, one) for one in sums)
    assert torch.equal(g, to_bfloat16(whole).float()) and not torch.equal(g, whole)


@pytest.mark.parametrize("recipe", [byteback.UnifiedInt8, byteback.DistributionAdaptiveInt8, byteback.PlainInt8])
@pytest.mark.parametrize("memory", ["float32", "bfloat16", "int8"])
def test_steps_and_operators_agree(recipe: Any, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, results = prepared(recipe, norm_memory=memory), []
    model.body[1].early = memory == "int8"
    for enabled in (True, False):
        monkeypatch.setattr(step, "enabled", enabled)
        results.append(trained(copy.deepcopy(model)))
    same(*results)


@pytest.mark.skipif(paths.available() == ["reference"], reason="this build has no native library")
def test_every_path_gives_the_same_bits() -> None:
    torch.manual_seed(3)
    results = {}
    for path in paths.available():
        model = prepared()
        model.stem.requires_grad_(False)
        with paths.path(path):
            y = F.relu(model.stem(IMAGES))
            for block in model.body:
                y = block(y)
            y.backward(torch.ones(y.shape) * 0.01)
        results[path] = [p.grad for p in model.body.parameters()]
    for result in results.values():
        same(result, results["reference"])


@pytest.mark.parametrize("recipe", [byteback.UnifiedInt8, byteback.DistributionAdaptiveInt8, byteback.PlainInt8])
def test_bits_are_those_of_ordinary_tensors(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both(trained, monkeypatch, recipe=recipe)


def test_a_sum_that_a_stride_completes_is_float32(passed: list[tuple[torch.dtype, bool]]) -> None:
    model = prepared()
    model.body[1].early = True
    model(IMAGES).square().sum().backward()
    wide, small = (torch.float32, False), (BF16, True)
    assert passed == [small, wide, small, small, small, wide, wide, small, wide, small]


def test_hooks_and_retained_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        seen: list[Tensor] = []
        output = model(IMAGES)
        for activation in model.seen:
            activation.register_hook(lambda g: seen.append(g.clone()))
            activation.register_hook(lambda g: g * 2)
            activation.retain_grad()
        model.seen[1].grad_fn.register_prehook(lambda grads: (grads[0] + 1,))
        model.seen[2].grad_fn.register_hook(lambda made, _: seen.append(made[0].abs()))
        output.square().sum().backward()
        assert all(type(g) is Tensor and g.dtype == torch.float32 for g in seen)
        return seen + [activation.grad for activation in model.seen] + gradients(model)

    both(run, monkeypatch)


def test_a_hook_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(g: Tensor) -> None:
        g[:, 0].zero_()

    def run(model: Any) -> list[Tensor]:
        output = model(IMAGES)
        for activation in model.seen[1:3]:
            activation.register_hook(lambda g: g.detach().mul_(2.0))
            activation.register_hook(write)
        output.square().sum().backward()
        return gradients(model)

    both(run, monkeypatch)


def test_gradients_of_activations_and_parts_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        loss = model(IMAGES).square().sum()
        made = list(torch.autograd.grad(loss, [model.seen[2], model.seen[0]], retain_graph=True))
        made += torch.autograd.grad(loss, [model.body[1].conv2.weight], retain_graph=True)
        made += torch.autograd.grad(loss, [model.body[2].norm3.weight], retain_graph=True)
        made += torch.autograd.grad(loss, list(model.parameters()))
        return [g + 0.0 for g in made]

    both(run, monkeypatch)


def test_other_readers_add_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        output = model(IMAGES)
        (output.square().sum() + model.seen[2].sum() + F.avg_pool2d(model.seen[1], 2).square().sum()).backward()
        return gradients(model)

    both(run, monkeypatch)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        model.run = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)
        return trained(model)

    both(run, monkeypatch)


def test_compiled_autograd_gets_ordinary_tensors(
    passed: list[tuple[torch.dtype, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(model: Any) -> list[Tensor]:
        with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
            model(IMAGES).square().sum().backward()
        return gradients(model)

    both(run, monkeypatch)
    assert (BF16, False) in passed and not any(lazy for _, lazy in passed)


def test_create_graph_gets_ordinary_tensors(passed: list[tuple[torch.dtype, bool]]) -> None:
    model = prepared()
    loss = model(IMAGES).square().sum()
    made = torch.autograd.grad(loss, [model.seen[0], *model.parameters()], create_graph=True)
    assert (BF16, False) in passed and not any(lazy for _, lazy in passed)
    with pytest.raises(RuntimeError, match="differentiated a second time"):
        torch.autograd.grad(made[0].sum(), [model.stem.weight])


def test_anomaly_mode_looks_at_every_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any) -> list[Tensor]:
        with torch.autograd.detect_anomaly(check_nan=True):
            return trained(model)

    with pytest.warns(UserWarning, match="Anomaly Detection"):
        both(run, monkeypatch)
