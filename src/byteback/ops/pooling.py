# SPDX-License-Identifier: Apache-2.0
"""Pooling of float images. A backend may have versions that need less time and memory than PyTorch.

    max_pool      F.max_pool2d that saves one byte per output: the index of the largest tap of its window. PyTorch saves eight
                  bytes and the whole input. Values and gradients have the bits of PyTorch.
    take_pixels   F.avg_pool2d with a kernel of one pixel, as in the shortcuts of small ResNets: takes every stride-th pixel.
                  PyTorch adds each pixel to zero and divides by one; its gradient fills an image with zeros and adds to it.

If a backend does not have them (`has_max_pool`, a result of None), callers use the operator of PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from byteback.ops.backends.registry import backend_for, backend_of
from byteback.ops.types import Pair, Window

__all__ = ["Window", "has_max_pool", "max_pool", "max_pool_grad", "spread_pixels", "take_pixels"]


def has_max_pool(x: Tensor, window: Window) -> bool:
    """Whether max_pool supports this tensor (in any layout) and this window."""
    return backend_of(x).has_max_pool(x, window)


def max_pool(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Returns (the maximum of each window, the index of its tap as uint8), both channels last.

    >>> x, window = torch.tensor([[1.0, 5.0], [3.0, 2.0]]).reshape(1, 1, 2, 2), Window((2, 2), (2, 2), (0, 0), (1, 1))
    >>> [int(part) for part in max_pool(x, window)]
    [5, 1]
    """
    return backend_for("max_pool", x).max_pool(x, window)


def max_pool_grad(g: Tensor, taps: Tensor, size: Sequence[int], window: Window) -> Tensor:
    """Returns the gradient of x, channels last. `size` is the size of x. Each g is added to the pixel of its tap."""
    if not g.shape == taps.shape == (*size[:2], *window.counts(size[2:])) or g.dtype is not torch.float32:
        raise ValueError(
            f"max_pool_grad: a gradient of shape {tuple(g.shape)} and dtype {g.dtype} does not fit the pooling of an image of "
            f"shape {tuple(size)}. Pass the gradient of the output of max_pool, in float32."
        )
    return backend_for("max_pool_grad", g, taps).max_pool_grad(g, taps, size, window)


def take_pixels(x: Tensor, stride: Pair) -> Tensor | None:
    """Returns x[:, :, ::stride[0], ::stride[1]], channels last; None if the caller must use avg_pool2d of PyTorch.

    >>> x = torch.arange(12.0).reshape(1, 2, 2, 3).contiguous(memory_format=torch.channels_last)
    >>> made = take_pixels(x, (2, 2))
    >>> made is None or made.flatten().tolist() == [0.0, 2.0, 6.0, 8.0]
    True
    """
    return backend_for("take_pixels", x).take_pixels(x, stride)


def spread_pixels(y: Tensor, size: Sequence[int], stride: Pair) -> Tensor | None:
    """Returns the gradient of take_pixels for an x of this size: y at the pixels that were taken, 0 elsewhere."""
    return backend_for("spread_pixels", y).spread_pixels(y, size, stride)
