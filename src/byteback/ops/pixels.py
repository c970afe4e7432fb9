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

from byteback.addresses import is_last, known, last
from byteback.ops import layout, native, pool

_library: Any = native.library
_float32 = torch.float32


def _numbers(size: Sequence[int], stride: tuple[int, int]) -> tuple[int, ...]:
    n, c, h, w = size
    return n, h, w, c, *stride, (h - 1) // stride[0] + 1, (w - 1) // stride[1] + 1


def _is_ready(x: Tensor, stride: tuple[int, int]) -> bool:
    if native.number() is None or x.dim() != 4 or not x.numel() or min(stride) < 1:
        return False
    return is_last(x, _float32, x.numel()) and not x.is_neg()


def empty(size: Sequence[int], device: torch.device, dtype: torch.dtype = _float32) -> Tensor:
    """An image with channels last, from the pool."""
    return pool.empty(size, layout.dense_strides(list(size), True), dtype, device)


def take_pixels(x: Tensor, stride: tuple[int, int]) -> Tensor | None:
    """x[:, :, ::stride[0], ::stride[1]], channels last.

    >>> x = torch.arange(12.0).reshape(1, 2, 2, 3).contiguous(memory_format=torch.channels_last)
    >>> made = take_pixels(x, (2, 2))
    >>> made is None or made.flatten().tolist() == [0.0, 2.0, 6.0, 8.0]
    True
    """
    if not _is_ready(x, stride):
        return None
    numbers = _numbers(x.shape, stride)
    y = empty((numbers[0], numbers[3], *numbers[-2:]), x.device)
    addresses = last(x, _float32, x.numel()), known(y)
    _library.take_pixels(numbers, *addresses, torch.get_num_threads())
    return y


def spread_pixels(y: Tensor, size: Sequence[int], stride: tuple[int, int]) -> Tensor | None:
    """The gradient of take_pixels for an x of this size: y where the pixels came from, 0 elsewhere."""
    if not _is_ready(y, stride):
        return None
    numbers = _numbers(size, stride)
    if tuple(y.shape) != (numbers[0], numbers[3], *numbers[-2:]):
        return None
    x = empty(size, y.device)
    addresses = last(y, _float32, y.numel()), known(x)
    _library.spread_pixels(numbers, *addresses, torch.get_num_threads())
    return x
