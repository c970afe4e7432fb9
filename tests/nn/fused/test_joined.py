# SPDX-License-Identifier: Apache-2.0
"""Concatenations and max-pools of blocks, and tensors with several readers: the numbers of the unfused path, fewer readings."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import byteback
from byteback import ops
from byteback.convert.graph import find_blocks
from byteback.models.resnet import SmallResNet
from byteback.nn.fused.pooling import Joined
from byteback.nn.fused.sources import Floats, LazyActivation, source_of


class Basic(nn.Module):
    """conv, norm, relu, as in Inception."""

    def __init__(self, c: int, k: int, size: int, **options: Any) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(c, k, size, bias=False, **options), nn.BatchNorm2d(k)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Mixed(nn.Module):
    """Four branches that are put side by side; one is an average."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.one, self.three = Basic(c, 8, 1), Basic(c, 12, 3, padding=1)
        self.deep1, self.deep2 = Basic(c, 5, 1), Basic(5, 8, 3, padding=1)
        self.pool = Basic(c, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pool(F.avg_pool2d(x, 3, stride=1, padding=1))
        return torch.cat([self.one(x), self.three(x), self.deep2(self.deep1(x)), pooled], 1)


class Reduce(nn.Module):
    """Fewer pixels: a convolution beside a max-pool."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv = Basic(c, 8, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv(x), F.max_pool2d(x, kernel_size=3, stride=2)], 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = Basic(3, 8, 3), nn.MaxPool2d(3, 2)
        self.mixed1, self.reduce, self.mixed2 = Mixed(8), Reduce(32), Mixed(40)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mixed2(self.reduce(self.mixed1(self.pool(self.stem(x))))).mean((2, 3)))


def near(a: Tensor, b: Tensor, share: float) -> bool:
    return bool((a - b).norm() <= share * b.norm() + 1e-6)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    output = model(x)
    assert type(output) is Tensor
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in model.parameters())]  # type: ignore[misc]


@pytest.mark.parametrize("recipe", ["unified-int8", "distribution-adaptive-int8", "plain-int8"])
@pytest.mark.parametrize("channels_last", [True, False])
def test_a_network_with_branches_matches_the_unfused_path(recipe: str, channels_last: bool) -> None:
    torch.manual_seed(4)
    model = Net()
    twin = copy.deepcopy(model)
    torch.manual_seed(7)
    exact = replace(byteback.recipes.resolve(recipe), norm_memory="float32")
    byteback.prepare(model, exact)
    byteback.prepare(twin, exact, fuse=False)
    x = torch.randn(6, 3, 19, 19)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        for a, b in zip(gradients(model, x), gradients(twin, x), strict=True):
            assert near(a, b, 0.06)
    for (name, buffer), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=2e-2, atol=5e-3, msg=name)
    model.eval(), twin.eval()
    with torch.no_grad():
        assert near(model(x), twin(x), 0.02)
    with torch.inference_mode():
        assert near(model(x), twin(x), 0.02)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all passes that quantize an input from now on."""
    calls: list[str] = []
    passes = ("normalize", "normalize_batch", "conv_normalize_batch", "normalize_peak")
    for name in ("quantize", "quantize_max", "absmax", *passes):
        original = getattr(ops, name)

        def count(x: Tensor, *rest: Any, original: Any = original, name: str = name, **options: Any) -> Any:
            at_once = name.endswith("normalize_batch")  # what backward needs is kept, and the result written if somebody waits
            written = not at_once or options["want_int8"] or options["want_float"]
            if x.dim() == 4 and x.shape[0] == 6 and written:  # not a weight
                calls.append("normalize" if at_once else name)
            return original(x, *rest, **options)

        monkeypatch.setattr(ops, name, count)
    return calls


def test_each_tensor_is_quantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    model = byteback.prepare(Net(), "plain-int8")
    x = torch.randn(6, 3, 21, 21)
    gradients(model, x)  # the first step also measures deviations, for which it looks at floats
    calls = counted(monkeypatch)
    model(x)
    # 12 blocks, each written in one pass. Both pools bring their clip along: the first is quantized for its readers, the second
    # as a part of its concatenation. Two averages are read by a convolution each.
    assert sorted(set(calls)) == ["normalize", "quantize", "quantize_max"]
    assert [calls.count(name) for name in ("normalize", "quantize", "quantize_max")] == [12, 2, 2]


def chain() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    model = byteback.prepare(nn.Sequential(Basic(3, 8, 3), Mixed(8), Mixed(32)), "plain-int8")
    x = torch.randn(2, 3, 13, 13)
    return model, x, model[1](model[0](x))


def test_a_concatenation_is_written_when_it_is_read() -> None:
    _, _, y = chain()
    source = source_of(y)
    assert isinstance(y, LazyActivation) and isinstance(source, Joined) and y.shape == (2, 32, 11, 11)
    assert source.output is None and not source.quantized
    parts = [part.plain() for part in source.parts]
    plain = torch.cat(parts, 1)
    assert torch.equal(source.clip(), plain.abs().max())
    clip, q = source.int8()
    values, scale, expected, _ = ops.quantize(plain, clip.reshape(1, 1, 1, 1))
    assert torch.equal(q.values, values) and torch.equal(q.scale, scale) and torch.equal(q.counts, expected)
    assert torch.equal(y + 0.0, plain)


def test_writing_to_a_concatenation_or_to_a_part_of_it() -> None:
    model, _, y = chain()
    twin = y.clone()
    y[:, 3] = 2.0
    twin[:, 3] = 2.0
    assert source_of(y) is None and torch.equal(model[2](y), model[2](twin))
    pooled = F.max_pool2d(chain()[2], 3, 2)
    assert isinstance(source_of(pooled), Floats)
    joined = torch.cat([pooled, pooled], 1)
    before = (pooled + 0.0).detach()
    with torch.no_grad():
        pooled.zero_()
    assert torch.equal(joined.detach() + 0.0, torch.cat([before, before], 1))


def test_a_mixture_with_a_plain_tensor_is_an_ordinary_concatenation() -> None:
    _, _, y = chain()
    plain = torch.randn(2, 3, 11, 11, requires_grad=True) * 1.0
    for parts in ([y, plain], [plain, y]):
        joined = torch.cat(parts, 1)
        assert type(joined) is Tensor and torch.equal(joined, torch.cat([part + 0.0 for part in parts], 1))
    rows = torch.cat([y, y], 2)
    assert type(rows) is Tensor and rows.shape == (2, 32, 22, 11)


@pytest.mark.parametrize(
    ("size", "options", "exact"),
    [
        (11, {"kernel_size": 3, "stride": 2}, True),
        (12, {"kernel_size": 3, "stride": 2}, False),  # the last pixels lie in no window
        (12, {"kernel_size": 3, "stride": 2, "padding": 1}, True),
        (12, {"kernel_size": 2}, True),
        (12, {"kernel_size": (3, 2), "stride": (2, 1), "ceil_mode": True}, True),
        (12, {"kernel_size": 2, "stride": 3}, False),
        (12, {"kernel_size": 3, "stride": 1, "dilation": 2}, False),
    ],
)
@pytest.mark.parametrize("act", [nn.ReLU(), nn.Identity()])
def test_a_max_pool_knows_its_maximum_only_where_that_is_certain(
    size: int, options: dict[str, Any], exact: bool, act: nn.Module
) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), act, nn.MaxPool2d(**options), nn.Conv2d(8, 8, 1))
    model = byteback.prepare(nn.Sequential(*layers), byteback.PlainInt8())
    x = torch.randn(2, 3, size, size)
    pooled = model[:4](x)
    source = source_of(pooled)
    if isinstance(act, nn.Identity):
        exact = False
    assert isinstance(source, Floats) and (source.peak is not None) == exact
    plain = pooled.detach() + 0.0
    if exact:
        assert torch.equal(source.peak, plain.max())  # type: ignore[arg-type]
    clip, q = source.int8()
    values, scale, peak, _ = ops.quantize_max(plain, -1, None)
    assert torch.equal(q.values, values) and torch.equal(q.scale, scale) and torch.equal(clip.reshape(()), peak.reshape(()))
    twin = F.max_pool2d(source_of(model[:3](x)).plain().requires_grad_(), **options)  # type: ignore[union-attr]
    assert torch.equal(twin, plain) and pooled.stride() == twin.stride()


def test_a_float_tensor_with_many_readers_is_quantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3)
            self.each = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.stem(x))
            first = self.each[0](y) + self.each[1](y)
            y.mul_(2.0)
            return first + self.each[2](y) + self.each[3](y)

    torch.manual_seed(2)
    model = Branches()
    model.stem.requires_grad_(False)
    free = copy.deepcopy(model)
    free.stem.requires_grad_(True)
    x = torch.randn(6, 3, 9, 9)
    results = []
    # Without a history (a frozen stem) a tensor might be anybody's, so that it is not marked.
    for each, times in ((free, 2), (model, 4)):
        byteback.prepare(each, "plain-int8", fuse=False)
        calls = counted(monkeypatch)
        results.append(each(x))
        assert calls.count("quantize_max") == times
        monkeypatch.undo()
    assert torch.equal(*results)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("options", [{"stride": 2}, {"stride": (3, 2)}, {"stride": 1}, {"stride": 2, "ceil_mode": True}])
def test_a_pool_of_single_pixels_is_torchs(memory_format: torch.memory_format, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8))
    model = byteback.prepare(layers.to(memory_format=memory_format), "unified-int8")
    x = model[:3](torch.randn(2, 3, 9, 12).contiguous(memory_format=memory_format))
    assert isinstance(x, LazyActivation)
    twin = source_of(x).plain().clone().requires_grad_()  # type: ignore[union-attr]
    made, expected = F.avg_pool2d(x, 1, **options), F.avg_pool2d(twin, 1, **options)
    assert torch.equal(made, expected) and made.stride() == expected.stride()
    g = torch.randn_like(expected)
    (grad,), (other,) = torch.autograd.grad(made, x, g), torch.autograd.grad(expected, twin, g)
    assert torch.equal(grad, other) and grad.stride() == other.stride()


def test_a_network_that_skips_pixels_hands_on_its_integers() -> None:
    before = find_blocks(SmallResNet(1)).blocks["layer1.0.conv2"]
    assert before.feeds_pool and before.feeds_conv and not before.feeds_other
