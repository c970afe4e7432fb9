# SPDX-License-Identifier: Apache-2.0
"""Pools of float32 images in the native library. Others use PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
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
_TAPS = 256  # the number of values of a byte


def _image(size: Sequence[int], dtype: torch.dtype = _FLOAT32) -> Tensor:
    """Returns an empty image, channels last."""
    return allocator.empty(size, layout.dense_strides(list(size), True), dtype, CPU)


def has_max_pool(path: int, x: Tensor, window: Window) -> bool:
    """Whether the library supports this pool: float32 images and windows of at most 256 taps."""
    if x.dim() != 4 or x.dtype is not _FLOAT32 or not x.numel():
        return False
    return window.is_valid() and window.kernel[0] * window.kernel[1] <= _TAPS and min(window.counts(x.shape[2:])) > 0


@lru_cache(maxsize=1024)
def _windows(size: tuple[int, ...], window: Window) -> Any:
    """Returns the Windows (csrc/block/max_pool.h)."""
    kernel, stride, padding, dilation, _ = window
    count = window.counts(size[2:])
    given = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "count": count}
    return _native.Windows(batch=size[0], channels=size[1], size=size[2:], **given)


def max_pool(path: int, x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    x = x.contiguous(memory_format=torch.channels_last)
    size = *x.shape[:2], *window.counts(x.shape[2:])
    y, taps = _image(size), _image(size, _UINT8)
    address = last(x, _FLOAT32, x.numel())
    _native.max_pool(path, _windows(x.shape, window), x=address, y=known(y), taps=known(taps), threads=_threads())
    return y, taps


def max_pool_grad(path: int, g: Tensor, taps: Tensor, size: Sequence[int], window: Window) -> Tensor:
    dx = _image(size)
    g, taps = g.contiguous(memory_format=torch.channels_last), taps.contiguous(memory_format=torch.channels_last)
    _native.max_pool_grad(
        path,
        _windows(tuple(size), window),
        g=last(g, _FLOAT32, g.numel()),
        taps=last(taps, _UINT8, g.numel()),
        dx=known(dx),
        threads=_threads(),
    )
    return dx


@lru_cache(maxsize=1024)
def _pixels(size: tuple[int, ...], stride: Pair) -> tuple[Any, tuple[int, ...]]:
    """Returns the Pixels (csrc/block/pixels.h), and the size of the selected pixels."""
    count = (size[2] - 1) // stride[0] + 1, (size[3] - 1) // stride[1] + 1
    made = _native.Pixels(batch=size[0], channels=size[1], size=size[2:], stride=stride, count=count)
    return made, (*size[:2], *count)


def _is_image(x: Tensor, stride: Pair) -> bool:
    return x.dim() == 4 and min(stride) >= 1 and is_last(x, _FLOAT32, x.numel())


def take_pixels(path: int, x: Tensor, stride: Pair) -> Tensor | None:
    if not _is_image(x, stride):
        return None
    pixels, taken = _pixels(x.shape, stride)
    y = _image(taken)
    _native.take_pixels(pixels, x=last(x, _FLOAT32, x.numel()), y=known(y), threads=_threads())
    return y


def spread_pixels(path: int, y: Tensor, size: Sequence[int], stride: Pair) -> Tensor | None:
    if not _is_image(y, stride):
        return None
    pixels, taken = _pixels(tuple(size), stride)
    if y.shape != taken:
        return None
    x = _image(size)
    _native.spread_pixels(pixels, y=last(y, _FLOAT32, y.numel()), x=known(x), threads=_threads())
    return x
