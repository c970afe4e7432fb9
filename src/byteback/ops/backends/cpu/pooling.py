# SPDX-License-Identifier: Apache-2.0
"""Pools of float32 images on the native library; PyTorch's own operators take the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from byteback.ops.backends.cpu import allocator, library
from byteback.ops.backends.cpu.addresses import CPU, is_last, known, last
from byteback.ops.contract import layout
from byteback.ops.types import Pair, Window

_native: Any = library.native
_threads = torch.get_num_threads
_FLOAT32, _UINT8 = torch.float32, torch.uint8
_TAPS = 256  # what a byte can tell apart


def _image(size: Sequence[int], dtype: torch.dtype = _FLOAT32) -> Tensor:
    """An empty image with channels last."""
    return allocator.empty(size, layout.dense_strides(list(size), True), dtype, CPU)


def has_max_pool(path: int, x: Tensor, window: Window) -> bool:
    """For float32 images and windows of at most 256 taps."""
    if x.dim() != 4 or x.dtype is not _FLOAT32 or not x.numel():
        return False
    return window.is_valid() and window.kernel[0] * window.kernel[1] <= _TAPS and min(window.counts(x.shape[2:])) > 0


def _windows(size: Sequence[int], window: Window) -> tuple[int, ...]:
    n, c, h, w = size
    return n, h, w, c, *window.kernel, *window.stride, *window.padding, *window.dilation, *window.counts((h, w))


def max_pool(path: int, x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    x = x.contiguous(memory_format=torch.channels_last)
    size = *x.shape[:2], *window.counts(x.shape[2:])
    y, taps = _image(size), _image(size, _UINT8)
    addresses = last(x, _FLOAT32, x.numel()), known(y), known(taps)
    _native.max_pool(path, _windows(x.shape, window), *addresses, _threads())
    return y, taps


def max_pool_grad(path: int, g: Tensor, taps: Tensor, size: Sequence[int], window: Window) -> Tensor:
    dx = _image(size)
    g, taps = g.contiguous(memory_format=torch.channels_last), taps.contiguous(memory_format=torch.channels_last)
    addresses = last(g, _FLOAT32, g.numel()), last(taps, _UINT8, g.numel()), known(dx)
    _native.max_pool_grad(path, _windows(size, window), *addresses, _threads())
    return dx


def _pixels(size: Sequence[int], stride: Pair) -> tuple[int, ...]:
    n, c, h, w = size
    return n, h, w, c, *stride, (h - 1) // stride[0] + 1, (w - 1) // stride[1] + 1


def _is_image(x: Tensor, stride: Pair) -> bool:
    return x.dim() == 4 and min(stride) >= 1 and is_last(x, _FLOAT32, x.numel())


def take_pixels(path: int, x: Tensor, stride: Pair) -> Tensor | None:
    if not _is_image(x, stride):
        return None
    numbers = _pixels(x.shape, stride)
    y = _image((*x.shape[:2], *numbers[-2:]))
    _native.take_pixels(numbers, last(x, _FLOAT32, x.numel()), known(y), _threads())
    return y


def spread_pixels(path: int, y: Tensor, size: Sequence[int], stride: Pair) -> Tensor | None:
    if not _is_image(y, stride):
        return None
    numbers = _pixels(size, stride)
    if tuple(y.shape) != (numbers[0], numbers[3], *numbers[-2:]):
        return None
    x = _image(size)
    _native.spread_pixels(numbers, last(y, _FLOAT32, y.numel()), known(x), _threads())
    return x
