# SPDX-License-Identifier: Apache-2.0
"""ops/pooling.py against slices and against PyTorch's pool of single pixels."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from byteback.ops.backends import paths
from byteback.ops.backends.cpu import library as native_library
from byteback.ops.pooling import spread_pixels, take_pixels

with_native = pytest.mark.skipif(native_library.native is None, reason="needs the native library")


@with_native
@pytest.mark.parametrize("size", [(2, 3, 4, 6), (1, 16, 7, 5), (3, 1, 1, 9), (2, 5, 2, 2)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (3, 2), (4, 9)])
def test_pixels_are_those_of_a_slice_and_their_gradient_is_the_pools(size: tuple[int, ...], stride: tuple[int, int]) -> None:
    x = torch.randn(size).contiguous(memory_format=torch.channels_last).requires_grad_()
    made = take_pixels(x.detach(), stride)
    assert made is not None and torch.equal(made, x.detach()[:, :, :: stride[0], :: stride[1]])
    assert made.is_contiguous(memory_format=torch.channels_last)
    g = torch.randn(made.shape).contiguous(memory_format=torch.channels_last)
    F.avg_pool2d(x, 1, stride).backward(g)
    spread = spread_pixels(g, size, stride)
    assert spread is not None and torch.equal(spread, x.grad)
    assert spread.is_contiguous(memory_format=torch.channels_last)


def test_others_are_left_to_pytorch() -> None:
    first = torch.randn(2, 3, 4, 4)  # channels first
    assert take_pixels(first, (2, 2)) is None and spread_pixels(first, (2, 3, 8, 8), (2, 2)) is None
    last = first.contiguous(memory_format=torch.channels_last)
    assert take_pixels(last.double(), (2, 2)) is None and take_pixels(last[:0], (2, 2)) is None
    assert spread_pixels(last, (2, 3, 9, 9), (2, 2)) is None  # not the gradient of such an image
    with paths.path("reference"):
        assert take_pixels(last, (2, 2)) is None
