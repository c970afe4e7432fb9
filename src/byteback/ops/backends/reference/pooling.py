# SPDX-License-Identifier: Apache-2.0
"""Pooling in plain PyTorch. Forward uses the operators of PyTorch; backward also works after a forward on another path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from byteback.ops.contract import layout
from byteback.ops.types import Pair, Window


def has_max_pool(x: Tensor, window: Window) -> bool:
    """Returns False: callers use max_pool2d of PyTorch."""
    return False


def max_pool(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Returns the maximum of each window and the index of its tap, channels last."""
    y, places = torch.ops.aten.max_pool2d_with_indices(x, *map(list, window[:4]), window.ceil_mode)
    h, w = places // x.shape[3] - _starts(y, window, 2)[:, None], places % x.shape[3] - _starts(y, window, 3)
    taps = h // window.dilation[0] * window.kernel[1] + w // window.dilation[1]
    return layout.channels_last(y), layout.channels_last(taps.to(torch.uint8))


def _starts(windows: Tensor, window: Window, axis: int) -> Tensor:
    """Returns the first row (axis 2) or column (axis 3) of each window, which may be in the padding."""
    counted = torch.arange(windows.shape[axis], device=windows.device)
    return counted * window.stride[axis - 2] - window.padding[axis - 2]


@torch.no_grad()
def max_pool_grad(g: Tensor, taps: Tensor, size: Sequence[int], window: Window) -> Tensor:
    """Returns the gradient of x, channels last. Converts taps to the indices of PyTorch."""
    dx = torch.empty_strided(size, layout.last_strides(size), dtype=torch.float32, device=g.device)
    taps = taps.long()
    h = _starts(taps, window, 2)[:, None] + taps // window.kernel[1] * window.dilation[0]
    w = _starts(taps, window, 3) + taps % window.kernel[1] * window.dilation[1]
    places = h * dx.shape[3] + w
    made = torch.ops.aten.max_pool2d_with_indices_backward(g, dx, *map(list, window[:4]), window.ceil_mode, places)
    return dx.copy_(made)


def take_pixels(x: Tensor, stride: Pair) -> Tensor | None:
    """Returns None: callers use avg_pool2d of PyTorch."""
    return None


def spread_pixels(y: Tensor, size: Sequence[int], stride: Pair) -> Tensor | None:
    """Returns None: callers use avg_pool2d of PyTorch."""
    return None
