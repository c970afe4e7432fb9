# SPDX-License-Identifier: Apache-2.0
"""Max-pooling on a GPU. Pools of single pixels use avg_pool2d of PyTorch, as on the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from byteback.ops.backends import reference
from byteback.ops.backends.triton.block import rows_and_tile
from byteback.ops.backends.triton.kernels import pool as kernels
from byteback.ops.backends.triton.launch import blocks, fits, launch
from byteback.ops.contract.layout import channels_last, last_strides
from byteback.ops.types import Window

spread_pixels = reference.spread_pixels
take_pixels = reference.take_pixels

_TAPS = 256  # the number of values of a byte


def has_max_pool(x: Tensor, window: Window) -> bool:
    """Whether the kernels support this pool: float32 images and windows of at most 256 taps."""
    if x.dim() != 4 or x.dtype is not torch.float32 or not fits(x) or not window.is_valid():
        return False
    return window.kernel[0] * window.kernel[1] <= _TAPS and min(window.counts(x.shape[2:])) > 0


def _image(size: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, last_strides(size), dtype=dtype, device=like.device)


@torch.no_grad()
def max_pool(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    if not has_max_pool(x, window):
        return reference.max_pool(x, window)
    n, c, h, w = x.shape
    out = window.counts((h, w))
    y, taps = _image((n, c, *out), x, torch.float32), _image((n, c, *out), x, torch.uint8)
    _launch(kernels.forward, y, (channels_last(x), y, taps), (n, h, w, c, *out), window)
    return y, taps


@torch.no_grad()
def max_pool_grad(g: Tensor, taps: Tensor, size: Sequence[int], window: Window) -> Tensor:
    dx = _image(size, g, torch.float32)
    if not fits(g, taps, dx):
        return reference.max_pool_grad(g, taps, size, window)
    n, c, h, w = size
    _launch(kernels.backward, dx, (channels_last(g), channels_last(taps), dx), (n, h, w, c, *g.shape[2:]), window)
    return dx


def _launch(kernel: object, over: Tensor, tensors: tuple[Tensor, ...], sizes: tuple[int, ...], window: Window) -> None:
    """Runs a kernel over the pixels and channels of `over`."""
    rows, c, tile = rows_and_tile(over)
    taps = dict(zip("RS", window.kernel, strict=True))
    grid = blocks(rows, tile["BR"]), blocks(c, tile["BC"])
    launch(kernel, grid, *tensors, *sizes, *window.stride, *window.padding, *window.dilation, **taps, **tile)
