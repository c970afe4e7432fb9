# SPDX-License-Identifier: Apache-2.0
"""Passes that also write their integers packed by 16 images, in Triton's interpreter; and grad_weight of packed operands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import byteback
from byteback import ops
from byteback.ops import quantizer
from byteback.ops.backends import paths, reference
from byteback.ops.backends.triton import block_grad, packing, products, tiles
from byteback.ops.backends.triton.block import normalize
from byteback.ops.backends.triton.quantize import quantize_packing
from byteback.ops.contract.packing import packed, packed_size, unpacked
from byteback.ops.types import GradientParts, PackedQTensor, QTensor
from byteback.quantize import Moment, Quantizer, Settings, TensorRule
from interpreted import interpreting
from same_bits import assert_same_bits, drawn, integers

KEY = torch.tensor([123456789, 987654321])
SHAPE = (30, 11, 3, 5)


def assert_packs(q: QTensor, expected: QTensor) -> None:
    """q has the integers, scale and counts of the reference, and a packed copy of the integers."""
    assert isinstance(q, PackedQTensor)
    assert_same_bits(q[:3], expected[:3])
    assert_same_bits(q.packed, packed(expected.values))


@pytest.mark.parametrize("shape", [SHAPE, (32, 3, 4), (2, 5, 2, 3, 4)])
def test_unpacking_gives_the_tensor_back(shape: tuple[int, ...]) -> None:
    x = integers(shape, torch.Generator().manual_seed(0))
    assert packed(x).shape == packed_size(shape)
    assert_same_bits(unpacked(packed(x), shape[0]), x)
    assert packed(x)[-1, ..., shape[0] % 16 or 16 :].eq(0).all()


@pytest.mark.parametrize("shape", [SHAPE, pytest.param((16, 70, 7), marks=pytest.mark.slow)])
def test_quantize_writes_both_copies_in_one_reading(shape: tuple[int, ...]) -> None:
    x = drawn(shape, torch.Generator().manual_seed(0), bad=True)
    for axis, key in ((-1, None), (1, KEY)):
        clip = reference.absmax(torch.nan_to_num(x, 0.0, 2.0, -2.0), axis) * 0.6
        assert_packs(quantize_packing(x, clip, key, True), reference.quantize(x, clip, key))


def test_the_forward_pass_of_a_block_writes_both_copies_in_one_reading() -> None:
    draw, c = torch.Generator().manual_seed(0), SHAPE[1]
    x, plus = drawn(SHAPE, draw), drawn(SHAPE, draw)
    a, b, clip = torch.randn(c, generator=draw), torch.randn(c, generator=draw), torch.tensor(2.0)
    extremes = x.amin((0, 2, 3)), x.amax((0, 2, 3)), x.mean((0, 2, 3))
    arguments = x, a, b, plus, "relu", clip, True, True, "int8", extremes, None
    found, expected = normalize(*arguments, True), reference.normalize(*arguments)
    assert found.q is not None and expected.q is not None
    assert_packs(found.q, expected.q)
    assert_same_bits(found[1:], expected[1:])


@pytest.mark.parametrize("activation", ["relu", pytest.param("silu", marks=pytest.mark.slow)])
def test_the_backward_passes_of_a_block_write_both_copies_in_one_reading(activation: str) -> None:
    draw, c = torch.Generator().manual_seed(0), SHAPE[1]
    x, g = drawn(SHAPE, draw), drawn(SHAPE, draw)
    a, b, q, r = (torch.randn(c, generator=draw) for _ in range(4))
    parts = GradientParts(g, x, a, b, None, activation, a, q, r)
    peak = reference.absmax(reference.normalize_grad(parts), 1)
    clips = peak.amax() * 0.5, peak * 0.7
    one, each = block_grad.normalize_grad_quantize_pair(parts, *clips, KEY, True)
    expected = reference.normalize_grad_quantize_pair(parts, *clips, KEY)
    assert_same_bits(one[:3], expected[0][:3])
    assert not isinstance(one, PackedQTensor)  # grad_input reads it
    assert_packs(each, expected[1])


def test_a_copy_that_does_not_pay_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def writes(images: int, *rest: int, packs: bool = True) -> bool:
        return packing.new_packed(torch.empty(images, *rest, device="meta"), packs) is not None

    assert writes(128, 64, 7, 7) and writes(16, 64, 7) and writes(13, 64, 7, 7)
    assert not writes(12, 64, 7, 7)  # a quarter of the images of a tile would be missing
    assert not writes(128, 64) and not writes(128, 64, 7, 7, packs=False)
    assert not writes(16, 2**14, 2**7, 2**7 + 1)  # too large for offsets in int32
    monkeypatch.setattr(tiles, "multiplies_int8", lambda _: False)
    assert not writes(128, 64, 7, 7)


@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("groups", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_grad_weight_takes_packed_operands(which: tuple[bool, bool], groups: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x, g = integers((18, 8, 5, 4), draw), integers((18, 6, 3, 2), draw)
    x, g = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, g))
    scales = torch.rand(1, 6, 1, 1, generator=draw), torch.rand(1, 1, 1, 1, generator=draw)
    geometry = [6, 8 // groups, 3, 3], 2, 1, 1, groups
    expected = ops.conv_int8_grad_weight(g, scales[0], x, scales[1], *geometry)
    given = [packed(tensor) if packs else tensor for tensor, packs in zip((g, x), which, strict=True)]

    def run() -> Tensor:
        return ops.conv_int8_grad_weight(given[0], scales[0], given[1], scales[1], *geometry)

    with interpreting():
        found = [run()]
    for path in paths.available():
        with byteback.path(path):
            found.append(run())
    meta = [tensor.to("meta") for tensor in (given[0], scales[0], given[1], scales[1])]
    empty = ops.conv_int8_grad_weight(*meta, *geometry)
    for result in found:
        assert_same_bits(result, expected)
        assert result.stride() == expected.stride() == empty.stride()


def test_packed_operands_of_another_batch_are_refused() -> None:
    x, g = torch.zeros(2, 5, 4, 8, 16, dtype=torch.int8), torch.zeros(16, 6, 5, 4, dtype=torch.int8)
    one = torch.ones(1, 1, 1, 1)
    with pytest.raises(ValueError, match="2 groups of 16 images, but the other operand has 16 images"):
        ops.conv_int8_grad_weight(g, one, x, one, [6, 8, 1, 1], 1, 0, 1)


class Net(nn.Module):
    """A layer that stays float, a pointwise and a depthwise convolution, each with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.third, self.norm3 = nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.first(x)))
        x = F.relu(self.norm2(self.second(x)))
        return self.norm3(self.third(x)).mean((2, 3))


def trained(recipe: str, fuse: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = byteback.prepare(Net(), byteback.recipes.resolve(recipe), fuse=fuse).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    byteback.scale_learning_rates(optimizer, model)
    x = torch.randn(16, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    model(x).square().mean().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [*grads, *(value.clone() for value in model.state_dict().values())]


@pytest.mark.parametrize(
    ("recipe", "fuse", "packings"),
    [
        ("distribution-adaptive-int8", True, 0),
        pytest.param("distribution-adaptive-int8", False, 1, marks=pytest.mark.slow),
        pytest.param("plain-int8", False, 1, marks=pytest.mark.slow),
        pytest.param("unified-int8", True, 0, marks=pytest.mark.slow),
    ],
)
def test_a_step_with_packed_copies_equals_the_cpu(
    recipe: str, fuse: bool, packings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without blocks, an input that is shared by its readers is packed by a kernel of its own."""
    expected, sizes, own = trained(recipe, fuse), [], products.pack

    def pack(x: Tensor) -> Tensor:
        sizes.append(x.shape)
        return own(x)

    monkeypatch.setattr(products, "pack", pack)
    with interpreting():
        found = trained(recipe, fuse)
    assert_same_bits(found, expected)
    assert len(sizes) == packings, sizes


def test_a_tensor_with_nan_has_a_packed_copy_of_zeros() -> None:
    settings = Settings(TensorRule(), "grad_output", "layer", "skip", 3, 0.1, packs=True)
    x = drawn(SHAPE, torch.Generator().manual_seed(0), bad=True)
    state = Quantizer(1, False).state(torch.zeros((), dtype=torch.int64))
    with interpreting():
        q = quantizer.step(x, state, settings, None, Moment(torch.tensor(0), 0, True))
    assert isinstance(q, PackedQTensor)
    assert not q.values.any() and not q.packed.any()
