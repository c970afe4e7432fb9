# SPDX-License-Identifier: Apache-2.0
"""Proves that a product's result has the strides that torch's own float convolution gives for operands of that layout.

A layer that swaps float for int8 must not change the memory format of the network around it. The grad_output of the
gradients is laid out as torch lays out the output, which is what reaches a backward in practice. Gradients of an empty
batch are left out: torch copies the strides of an operand there that our operator never sees. With one thread torch picks
another backend for some shapes, and that one another format; ours does not depend on threads, so two are asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from byteback import ops

LAYOUTS = ["contiguous", "channels_last", "permuted", "sliced"]
CONV = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}

# id: (input size, weight size, stride, groups)
SHAPES: dict[str, tuple[list[int], list[int], int, int]] = {
    "usual": ([2, 3, 5, 6], [4, 3, 3, 3], 1, 1),
    "one_image": ([1, 3, 5, 6], [4, 3, 3, 3], 1, 1),
    "batch_of_17": ([17, 3, 5, 5], [4, 3, 3, 3], 1, 1),
    "one_input_channel": ([2, 1, 5, 6], [4, 1, 3, 3], 1, 1),
    "one_output_channel": ([2, 3, 5, 6], [1, 3, 3, 3], 1, 1),
    "one_channel_to_one": ([1, 1, 5, 5], [1, 1, 3, 3], 1, 1),
    "one_pixel_images": ([2, 4, 1, 1], [8, 4, 1, 1], 1, 1),
    "one_pixel_image": ([1, 4, 1, 1], [8, 4, 1, 1], 1, 1),
    "one_scalar_each": ([4, 1, 1, 1], [1, 1, 1, 1], 1, 1),
    "output_of_one_pixel": ([3, 4, 5, 5], [8, 4, 5, 5], 1, 1),
    "pointwise": ([2, 4, 5, 5], [8, 4, 1, 1], 1, 1),
    "narrow": ([2, 4, 6, 1], [4, 4, 3, 1], 2, 1),
    "flat": ([2, 4, 1, 6], [4, 4, 1, 3], 1, 1),
    "grouped_strided": ([2, 16, 8, 8], [16, 8, 3, 3], 2, 2),
    "depthwise": ([2, 4, 5, 6], [4, 1, 3, 3], 1, 4),
    "depthwise_one_pixel": ([1, 8, 1, 1], [8, 1, 1, 1], 1, 8),
    "empty_batch": ([0, 3, 5, 5], [4, 3, 3, 3], 1, 1),
    "one_dimension": ([2, 3, 7], [4, 3, 3], 1, 1),
    "one_dimension_depthwise": ([2, 4, 7], [4, 1, 3], 2, 4),
    "three_dimensions": ([2, 3, 4, 4, 4], [5, 3, 3, 3, 3], 1, 1),
    "three_dimensions_one_output_channel": ([2, 3, 4, 4, 4], [1, 3, 1, 1, 1], 1, 1),
    "three_dimensions_depthwise": ([2, 4, 4, 4, 4], [4, 1, 3, 3, 3], 1, 4),
}
by_shape = pytest.mark.parametrize("shape", list(SHAPES))
by_layout = pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, LAYOUTS)), ids="_and_".join)


@pytest.fixture(autouse=True)
def two_threads(restore_threads: None) -> Iterator[None]:
    torch.set_num_threads(2)
    yield


def case(oracle: Any, shape: str, layouts: tuple[str, str]) -> tuple[Tensor, Tensor, Tensor, list[Any]]:
    """int8 input and weight in their layouts, torch's float output for them, and the geometry."""
    input_size, weight_size, stride, groups = SHAPES[shape]
    spatial = len(input_size) - 2
    x, w = (oracle.laid_out(oracle.operand(s), lay) for s, lay in zip((input_size, weight_size), layouts, strict=True))
    geometry = [[stride] * spatial, [0] * spatial, [1] * spatial, groups]
    return x, w, CONV[x.dim()](as_float(x), as_float(w), None, *geometry), geometry


def as_float(x: Tensor) -> Tensor:
    """float32 with the very strides of x, dense or not."""
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return torch.zeros(extent).as_strided(x.shape, x.stride())


@by_shape
@by_layout
def test_output_has_the_strides_of_torchs_convolution(oracle: Any, shape: str, layouts: tuple[str, str]) -> None:
    x, w, output, geometry = case(oracle, shape, layouts)
    one = torch.ones((1,) * x.dim())
    assert ops.conv_int8(x, one, w, one, *geometry).stride() == output.stride()


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "empty_batch"])
@by_layout
def test_gradients_have_the_strides_of_torchs_backward(oracle: Any, shape: str, layouts: tuple[str, str]) -> None:
    x, w, output, geometry = case(oracle, shape, layouts)
    stride, padding, dilation, groups = geometry
    floats = (torch.zeros_like(output), as_float(x), as_float(w))
    grad_input, grad_weight, _ = torch.ops.aten.convolution_backward(
        *floats, None, stride, padding, dilation, False, padding, groups, [True, True, False]
    )
    g, one = torch.zeros_like(output, dtype=torch.int8), torch.ones((1,) * x.dim())
    assert g.stride() == output.stride()
    assert ops.conv_int8_grad_input(g, one, w, one, list(x.shape), *geometry).stride() == grad_input.stride()
    assert ops.conv_int8_grad_weight(g, one, x, one, list(w.shape), *geometry).stride() == grad_weight.stride()
