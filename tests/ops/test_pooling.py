# SPDX-License-Identifier: Apache-2.0
"""ops/pooling.py against PyTorch's pool, bit for bit: values, which pixel was the largest, gradients."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from byteback.ops.backends import paths
from byteback.ops.backends.cpu import library as native_library
from byteback.ops.pooling import Window, has_max_pool, max_pool, max_pool_grad

pytestmark = pytest.mark.skipif(native_library.native is None, reason="needs the native library")

PATHS = [path for path in paths.available() if path != "reference"]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, but for which NaN it is."""
    return torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5)) and torch.equal(a.isnan(), b.isnan())


def places(taps: Tensor, window: Window, width: int) -> Tensor:
    """The flat pixel that each tap names, as PyTorch counts them."""
    rows, columns = (torch.arange(count) for count in taps.shape[2:])
    h = rows[:, None] * window.stride[0] - window.padding[0] + taps // window.kernel[1] * window.dilation[0]
    return h * width + columns * window.stride[1] - window.padding[1] + taps % window.kernel[1] * window.dilation[1]


def check(x: Tensor, window: Window) -> None:
    x = x.detach().requires_grad_()
    options = window.kernel, window.stride, window.padding, window.dilation, window.ceil_mode
    expected, where = F.max_pool2d(x, *options, return_indices=True)  # type: ignore[misc]
    y, taps = max_pool(x.detach(), window)
    assert same(y, expected) and y.is_contiguous(memory_format=torch.channels_last)
    assert taps.dtype is torch.uint8 and torch.equal(places(taps.long(), window, x.shape[3]), where)
    g = torch.randn(expected.shape)
    expected.backward(g.contiguous(memory_format=torch.channels_last))
    dx = max_pool_grad(g, taps, x.shape, window)
    assert x.grad is not None and torch.equal(dx, x.grad)
    assert not bool((dx.signbit() & (dx == 0)).any())


def drawn(seed: int) -> tuple[Tensor, Window]:
    """Small images of few distinct values, so that many are equal, with NaN and infinities among them."""
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    kernel = rng.randint(1, 4), rng.randint(1, 4)
    dilation = rng.choice([1, 1, 1, 2]), rng.choice([1, 1, 1, 3])
    padding = rng.randint(0, kernel[0] // 2), rng.randint(0, kernel[1] // 2)
    least = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = rng.randint(1, 3), rng.choice([1, 3, 8, 63, 64, 65, 130]), *(part + rng.randint(0, 9) for part in least)
    x = torch.randint(-3, 4, size, generator=torch_rng).float()
    odd = torch.rand(size, generator=torch_rng)
    if seed % 3 == 0:
        x = torch.where(odd < 0.1, math.nan, torch.where(odd < 0.4, -math.inf, torch.where(odd > 0.97, math.inf, x)))
    if seed % 2:
        x = x.contiguous(memory_format=torch.channels_last)
    return x, Window(kernel, (rng.randint(1, 4), rng.randint(1, 4)), padding, dilation, rng.random() < 0.4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("threads", [1, 2])
def test_values_places_and_gradients_are_pytorchs(path: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with paths.path(path):
            for seed in range(120):
                x, window = drawn(seed)
                assert has_max_pool(x, window)
                check(x, window)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("window", [Window((3, 3), (2, 2), (1, 1), (1, 1)), Window((2, 2), (2, 2), (0, 0), (1, 1))])
def test_the_pools_of_resnet_and_vgg(window: Window) -> None:
    check(F.relu(torch.randn(2, 64, 28, 28)).contiguous(memory_format=torch.channels_last), window)


def test_the_gradient_does_not_hang_on_the_path() -> None:
    x, window = torch.randn(2, 5, 9, 9), Window((3, 3), (2, 2), (1, 1), (1, 1))
    y, taps = max_pool(x, window)
    g = torch.randn_like(y)
    expected = max_pool_grad(g, taps, x.shape, window)
    with paths.path("reference"):
        assert not has_max_pool(x, window) and torch.equal(max_pool_grad(g, taps, x.shape, window), expected)


def test_others_are_left_to_pytorch() -> None:
    x, window = torch.randn(2, 3, 8, 8), Window((2, 2), (2, 2), (0, 0), (1, 1))
    assert (
        has_max_pool(x, window)
        and not has_max_pool(x.double(), window)
        and not has_max_pool(x[0], window)
        and not has_max_pool(x[:0], window)
    )
    assert not has_max_pool(x, window._replace(kernel=(20, 20)))  # more taps than a byte can name
    assert not has_max_pool(x, window._replace(padding=(2, 2))) and not has_max_pool(x, window._replace(stride=(0, 1)))
    assert not has_max_pool(x, window._replace(kernel=(9, 9)))  # no window fits


def test_a_gradient_of_another_shape_is_refused() -> None:
    x, window = torch.randn(2, 3, 8, 8), Window((2, 2), (2, 2), (0, 0), (1, 1))
    y, taps = max_pool(x, window)
    for g in (torch.randn(2, 3, 4, 5), y.double()):
        with pytest.raises(ValueError, match="does not fit the pooling of an image of shape"):
            max_pool_grad(g, taps, x.shape, window)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("channels", [3, 40])
def test_a_dilated_window_that_steps_over_a_narrow_image_says_tap_0(path: str, channels: int) -> None:
    """Its taps are at -1 and 1, the image is one pixel wide: the value is -inf, and no gradient goes anywhere."""
    window = Window((1, 2), (1, 1), (0, 1), (1, 2))
    x = torch.randn(2, channels, 3, 1)
    with paths.path(path):
        y, taps = max_pool(x, window)
        dx = max_pool_grad(torch.ones_like(y), taps, x.shape, window)
    assert y.isneginf().all() and not taps.any() and not dx.any()


@pytest.mark.parametrize("kernel", [(2, 2), (3, 3), (3, 2)], ids=str)
def test_the_reference_has_the_same_pool(kernel: tuple[int, int]) -> None:
    x = torch.randn(2, 5, 9, 7, generator=torch.Generator().manual_seed(3)).round()  # with ties
    window = Window(kernel, (2, 1), (1, 1), (1, 2))
    y, taps = max_pool(x, window)
    with paths.path("reference"):
        assert not has_max_pool(x, window)
        expected = max_pool(x, window)
        assert torch.equal(expected[0], y) and torch.equal(expected[1], taps) and taps.dtype is torch.uint8
        grad = max_pool_grad(y, taps, x.shape, window)
    assert torch.equal(grad, max_pool_grad(y, taps, x.shape, window))
