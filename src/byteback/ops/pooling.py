# SPDX-License-Identifier: Apache-2.0
"""Pools of float images, which a backend may have in a form that is cheaper than PyTorch's.

    max_pool      F.max_pool2d that stores one byte for each output: which tap of its window was the largest. PyTorch stores
                  eight bytes and the whole input. The values and the gradients are PyTorch's, bit for bit.
    take_pixels   F.avg_pool2d with a kernel of one pixel, as the shortcut of a small ResNet has it: every stride-th pixel.
                  PyTorch adds each pixel to a zero and divides by one; its gradient fills an image with zeros and adds to it.

Where a backend has no such pool (`has_max_pool`, a result of None), callers use PyTorch's own operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from byteback.ops.backends.registry import backend_for, backend_of
from byteback.ops.types import Pair, Window

__all__ = ["Window", "has_max_pool", "max_pool", "max_pool_grad", "spread_pixels", "take_pixels"]


def has_max_pool(x: Tensor, window: Window) -> bool:
    """Whether max_pool takes this tensor (in any layout) and this window."""
    return backend_of(x).has_max_pool(x, window)


def max_pool(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """(the largest of each window, which of its taps that is as uint8), both channels last.

    >>> x, window = torch.tensor([[1.0, 5.0], [3.0, 2.0]]).reshape(1, 1, 2, 2), Window((2, 2), (2, 2), (0, 0), (1, 1))
    >>> [int(part) for part in max_pool(x, window)]
    [5, 1]
    """
    return backend_for("max_pool", x).max_pool(x, window)


def max_pool_grad(g: Tensor, taps: Tensor, size: Sequence[int], window: Window) -> Tensor:
    """The gradient of x, which had this size, channels last: each g goes to the pixel that its tap names."""
    if not g.shape == taps.shape == (*size[:2], *window.counts(size[2:])) or g.dtype is not torch.float32:
        raise ValueError(
            f"max_pool_grad: a gradient of shape {tuple(g.shape)} and {g.dtype} does not belong to windows over an image of "
            f"shape {tuple(size)}. Pass the gradient of what max_pool returned, in float32."
        )
    return backend_for("max_pool_grad", g, taps).max_pool_grad(g, taps, size, window)


def take_pixels(x: Tensor, stride: Pair) -> Tensor | None:
    """x[:, :, ::stride[0], ::stride[1]], channels last; None where PyTorch's avg_pool2d must do it.

    >>> x = torch.arange(12.0).reshape(1, 2, 2, 3).contiguous(memory_format=torch.channels_last)
    >>> made = take_pixels(x, (2, 2))
    >>> made is None or made.flatten().tolist() == [0.0, 2.0, 6.0, 8.0]
    True
    """
    return backend_for("take_pixels", x).take_pixels(x, stride)


def spread_pixels(y: Tensor, size: Sequence[int], stride: Pair) -> Tensor | None:
    """The gradient of take_pixels for an x of this size: y where the pixels came from, 0 elsewhere."""
    return backend_for("spread_pixels", y).spread_pixels(y, size, stride)
