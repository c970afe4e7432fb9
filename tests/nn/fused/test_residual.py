# SPDX-License-Identifier: Apache-2.0
"""residual_memory="int8": a block adds the int8 copy of its residual, and writes no floats that nobody needs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import byteback
from byteback import ops
from byteback.nn.fused import block
from byteback.nn.fused.block import FusedBlock
from byteback.nn.fused.sources import LazyActivation, Source, source_of
from byteback.ops.backends import paths


class Residual(nn.Module):
    """A ResNet block, with a shortcut of its own if it has a stride."""

    def __init__(self, c: int, k: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(c, k, 3, stride, 1, bias=False), nn.BatchNorm2d(k)
        self.conv2, self.norm2 = nn.Conv2d(k, k, 3, 1, 1, bias=False), nn.BatchNorm2d(k)
        self.down = nn.Sequential(nn.Conv2d(c, k, 1, stride, bias=False), nn.BatchNorm2d(k)) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.down is None else self.down(x)
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += skip
        return F.relu(out)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.body = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


def prepared(memory: str, model: nn.Module, recipe: type[byteback.Recipe] = byteback.PlainInt8) -> nn.Module:
    torch.manual_seed(7)
    return byteback.prepare(copy.deepcopy(model), recipe(residual_memory=memory))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in model.parameters())]  # type: ignore[misc]


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """(residual, whether floats were wanted) of each pass."""
    seen: list[tuple[Any, bool]] = []
    original, at_once, product = ops.normalize, ops.normalize_batch, ops.conv_normalize_batch

    def watch(x: Tensor, a: Tensor, b: Tensor, residual: Any, *rest: Any, **options: Any) -> Any:
        seen.append((residual, options["want_float"]))
        return original(x, a, b, residual, *rest, **options)

    def watch_batch(x: Tensor, norm: ops.BatchNorm, residual: Any, *rest: Any, **options: Any) -> Any:
        seen.append((residual, options["want_float"]))
        return at_once(x, norm, residual, *rest, **options)

    def watch_product(*arguments: Any, **options: Any) -> Any:
        seen.append((arguments[6], options["want_float"]))
        return product(*arguments, **options)

    monkeypatch.setattr(ops, "conv_normalize_batch", watch_product)
    monkeypatch.setattr(ops, "normalize", watch)
    monkeypatch.setattr(ops, "normalize_batch", watch_batch)
    return seen


def test_the_stream_is_int8_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = prepared("int8", Net())
    x = torch.randn(4, 3, 10, 10)
    gradients(model, x)  # the first step measures deviations, for which it looks at floats
    seen = watched(monkeypatch)
    model(x)
    residuals = [residual for residual, _ in seen if residual is not None]
    assert len(residuals) == 3 and all(residual[0].dtype == torch.int8 for residual in residuals)
    assert [floats for _, floats in seen].count(True) == 1  # the last block, for the head


def test_a_block_adds_values_times_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Source] = []
    monkeypatch.setattr(block, "attach_source", lambda output, source: computed.append(source) or output)
    torch.manual_seed(1)
    model = prepared("int8", nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Residual(8, 8, 1)))
    first = model[:2](torch.randn(4, 3, 9, 9))
    assert isinstance(first, LazyActivation)
    output = model[2](first)
    source, made = computed[-1], source_of(first).int8()[1]  # type: ignore[union-attr]
    z = source.x * source.a.reshape(1, -1, 1, 1) + source.b.reshape(1, -1, 1, 1)
    assert torch.equal(output + 0.0, F.relu(z + made.values * made.scale))


@pytest.mark.parametrize("recipe", [byteback.UnifiedInt8, byteback.DistributionAdaptiveInt8, byteback.PlainInt8])
def test_it_stays_near_the_float_stream(recipe: type[byteback.Recipe]) -> None:
    torch.manual_seed(2)
    net = Net()
    small, large = prepared("int8", net, recipe), prepared("float32", net, recipe)
    x = torch.randn(8, 3, 12, 12)
    for _ in range(2):
        exact, *others = (gradients(model, x) for model in (copy.deepcopy(net), small, large))
        assert all((other[0] - exact[0]).norm() <= 0.02 * exact[0].norm() for other in others)
        # Gradients of int8 are noisy by themselves; the residual adds little to that.
        mine, usual = (torch.cat([(a - b).flatten() for a, b in zip(other, exact, strict=True)]).norm() for other in others)
        assert mine <= 1.3 * usual
    small.eval(), large.eval()
    with torch.no_grad():
        assert (small(x) - large(x)).norm() <= 0.05 * large(x).norm()
        assert (small(x[:1]) - small(x)[:1]).norm() <= 1e-4 * small(x)[:1].norm()  # a prediction does not depend on its batch


@pytest.mark.skipif(paths.available() == ["reference"], reason="this build has no native library")
def test_every_path_gives_the_same_bits() -> None:
    torch.manual_seed(3)
    net, x = Net(), torch.randn(2, 3, 9, 9)
    net.stem.requires_grad_(False)
    results = {}
    for path in paths.available():
        model = prepared("int8", net)
        with paths.path(path):
            results[path] = gradients_of_blocks(model, x)
    for path, result in results.items():
        assert all(torch.equal(a, b) for a, b in zip(result, results["reference"], strict=True)), path


def gradients_of_blocks(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model.body(F.relu(model.stem(x)))
    y.backward(torch.ones(y.shape) * 0.01)
    return [y.detach() + 0.0, *(p.grad for p in model.body.parameters())]  # type: ignore[misc]


def test_nan_in_a_shortcut_is_not_lost() -> None:
    model = prepared("int8", Net())
    model.train()
    with torch.no_grad():
        model.body[1].down[1].bias[0] = float("nan")
    with pytest.raises(byteback.NonFiniteError):
        model(torch.randn(4, 3, 8, 8))


def test_it_needs_blocks_and_one_scale_for_the_whole_input(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = FusedBlock.apply
    monkeypatch.setattr(FusedBlock, "apply", lambda *args: calls.append(args) or original(*args))
    x = torch.randn(4, 3, 8, 8)
    unfused = byteback.prepare(Net(), byteback.PlainInt8(residual_memory="int8"), fuse=False)
    gradients(unfused, x)
    assert not calls
    rule = byteback.TensorRule(per="N") if hasattr(byteback, "TensorRule") else None
    if rule is not None:
        seen = watched(monkeypatch)
        recipe = byteback.PlainInt8(residual_memory="int8", input=rule, grad_weight=False)
        gradients(byteback.prepare(Net(), recipe), x)
        assert calls and not any(isinstance(residual, tuple) for residual, _ in seen)


def test_an_unknown_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="residual_memory is 'bfloat16'; choose one of float32, int8"):
        byteback.PlainInt8(residual_memory="bfloat16")
