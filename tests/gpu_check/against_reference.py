# SPDX-License-Identifier: Apache-2.0
"""Operators of the GPU's backend against the reference, bit by bit. What runs the kernels is up to the caller."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from byteback.ops.backends import reference, triton
from byteback.ops.backends.triton import tiles
from byteback.ops.backends.triton.kernels import conv_grad_weight
from byteback.ops.backends.triton.launch import launch
from byteback.ops.backends.triton.quantize import quantize_packing as quantize_into_both
from byteback.ops.contract import layout
from byteback.ops.contract.packing import packed
from byteback.ops.products import _output_size
from byteback.ops.types import ProductCall, for_grad_weight
from same_bits import assert_same_bits, drawn, integers

PRODUCTS = ("output", "grad_input", "grad_weight")


class Shape(NamedTuple):
    """Sizes of x and w, and how the convolution is done."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int = 1
    last: bool = True  # channels last
    processors: int = tiles.MULTIPROCESSORS  # with one multiprocessor, small products have the largest tiles


def product(kind: str, shape: Shape, varies: bool = True) -> None:
    """Compares one product. With `varies`, there is a scale for each channel."""
    draw = torch.Generator().manual_seed(1)
    geometry = shape.stride, shape.padding, shape.dilation, shape.groups
    out = tuple(_output_size("test", shape.x, shape.w, geometry))
    x, w, g = (integers(size, draw) for size in (shape.x, shape.w, out))
    if shape.last:
        x, w, g = (layout.channels_last(tensor) for tensor in (x, w, g))
    size, a, b, axes = {
        "output": (out, x, w, (0, 0)),
        "grad_input": (shape.x, g, w, (0, 1)),
        "grad_weight": (shape.w, g, x, (1, 1)),
    }[kind]

    def scale(tensor: Tensor, axis: int) -> Tensor:
        sizes = [size if varies and dim == axis else 1 for dim, size in enumerate(tensor.shape)]
        return torch.rand(sizes, generator=draw) + 0.01

    scales = scale(a, axes[0]), scale(b, axes[1])
    strides = layout.empty_like_product(list(size), a, b).stride()
    call = ProductCall(kind, size, strides, a, b, geometry, not varies)
    call.plan = triton.product_plan(call, a, b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "multiprocessors", lambda _: shape.processors)
        found = triton.product(call, a, scales[0], b, scales[1])
    assert_same_bits(found, reference.product(call, a, scales[0], b, scales[1]))
    assert found.stride() == strides, (found.stride(), strides)


def quantize(axis: int, noise: bool, last: bool = True) -> None:
    """Compares quantize of floats with NaN, infinity, subnormal numbers and -0."""
    x = drawn((3, 7, 5, 6), torch.Generator().manual_seed(0), last=last, bad=True)
    clip = reference.absmax(torch.nan_to_num(x, 0.0, 2.0, -2.0), axis) * 0.6
    key = reference.noise_key(torch.tensor(-5), torch.tensor(3), torch.tensor(2**33 + 1), 0) if noise else None
    assert_same_bits(triton.quantize(x, clip, key), reference.quantize(x, clip, key))


def quantize_packing() -> None:
    """Compares both copies of quantize: the integers, and those packed by 16 images, of which two are missing."""
    x = drawn((30, 11, 3, 5), torch.Generator().manual_seed(0), bad=True)
    clip = reference.absmax(torch.nan_to_num(x, 0.0, 2.0, -2.0), 1) * 0.6
    key = reference.noise_key(torch.tensor(-5), torch.tensor(3), torch.tensor(2**33 + 1), 0)
    q, expected = quantize_into_both(x, clip, key, True), reference.quantize(x, clip, key)
    assert_same_bits(q, expected)
    if tiles.multiplies_int8(x.device):
        assert_same_bits(for_grad_weight(q), packed(expected.values))


def sum_of_slices() -> None:
    """Adds slices of grad_weight whose sum int32 cannot hold."""
    part = torch.full((3, 4, 9, 8), 2**31 - 1, dtype=torch.int32)
    part[1, ::2] = -(2**31) + 5
    part[2, :, ::2] -= 12345
    total, found = part[0].numel(), torch.zeros(4, 9, 8)
    where = (part.shape[0], total, 9, 8, 72, 8, 1, 0, 0)
    launch(conv_grad_weight.finish, (2,), part, found, torch.tensor([0.37]), *where, B=256)
    assert_same_bits(found, part.long().sum(0).float() * torch.tensor(0.37))
