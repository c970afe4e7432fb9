# SPDX-License-Identifier: Apache-2.0
"""Every stride-th pixel of an image: F.avg_pool2d with a kernel of one pixel, as the shortcut of a small ResNet has it.

PyTorch adds each pixel to a zero and divides by one, and its gradient first fills an image with zeros and then adds to it. Here
pixels are moved, once. For channels-last float32 images on the CPU; None for others, which PyTorch serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from byteback.ops import layout, native, pool

_library: Any = native.library


def _numbers(size: Sequence[int], stride: tuple[int, int]) -> tuple[int, ...]:
    n, c, h, w = size
    return n, h, w, c, *stride, (h - 1) // stride[0] + 1, (w - 1) // stride[1] + 1


def _is_ready(x: Tensor) -> bool:
    return (
        native.number() is not None
        and x.dim() == 4
        and x.is_cpu
        and x.dtype is torch.float32
        and x.numel() > 0
        and layout.is_last_dense(x.shape, x.stride())
    )


def empty(size: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """An image with channels last, from the pool."""
    return pool.empty(size, layout.dense_strides(list(size), True), dtype)


def take_pixels(x: Tensor, stride: tuple[int, int]) -> Tensor | None:
    """x[:, :, ::stride[0], ::stride[1]], channels last.

    >>> x = torch.arange(12.0).reshape(1, 2, 2, 3).contiguous(memory_format=torch.channels_last)
    >>> made = take_pixels(x, (2, 2))
    >>> made is None or made.flatten().tolist() == [0.0, 2.0, 6.0, 8.0]
    True
    """
    if not _is_ready(x):
        return None
    numbers = _numbers(x.shape, stride)
    y = empty((numbers[0], numbers[3], *numbers[-2:]))
    _library.take_pixels(numbers, x.data_ptr(), y.data_ptr(), torch.get_num_threads())
    return y


def spread_pixels(y: Tensor, size: Sequence[int], stride: tuple[int, int]) -> Tensor | None:
    """The gradient of take_pixels for an x of this size: y where the pixels came from, 0 elsewhere."""
    if not _is_ready(y):
        return None
    numbers = _numbers(size, stride)
    if tuple(y.shape) != (numbers[0], numbers[3], *numbers[-2:]):
        return None
    x = empty(size)
    _library.spread_pixels(numbers, y.data_ptr(), x.data_ptr(), torch.get_num_threads())
    return x
