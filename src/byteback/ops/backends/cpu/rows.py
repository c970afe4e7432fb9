# SPDX-License-Identifier: Apache-2.0
"""The layout of a float tensor (N, C, ...) for the native library: dense rows of channels. Other tensors are copied."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from torch import Tensor

from byteback.ops.backends.cpu import library
from byteback.ops.contract import layout

_native: Any = library.native


@lru_cache(maxsize=4096)
def _rows_of(shape: tuple[int, ...], strides: tuple[int, ...], per_sample: bool) -> tuple[bool, Any]:
    """Returns whether a tensor is channels last, and its Rows (csrc/core/elementwise.h)."""
    n, c = shape[:2]
    pixels = math.prod(shape[2:])
    is_last = layout.is_last_dense(shape, strides)
    if not is_last:
        outer, inner, step, channel = n, pixels, 1, pixels
    elif per_sample:
        outer, inner, step, channel = n, pixels, c, 1
    else:
        outer, inner, step, channel = 1, n * pixels, c, 1
    made = _native.Rows(
        outer=outer, inner=inner, channels=c, outer_stride=pixels * c, inner_stride=step, channel_stride=channel
    )
    return is_last, made


def rows(x: Tensor, per_sample: bool = False) -> tuple[Tensor, Any]:
    """Returns x, copied if needed, and its layout."""
    is_last, made = _rows_of(x.shape, x.stride(), per_sample)
    return (x if is_last else x.contiguous()), made


def strides(per_scale: Tensor) -> tuple[int, int]:
    """Returns the (per sample, per channel) strides of a dense clip or scale (N or 1, C or 1, 1, ...)."""
    return (per_scale.shape[1] if per_scale.shape[0] > 1 else 0), (1 if per_scale.shape[1] > 1 else 0)


@lru_cache(maxsize=4096)
def clip_layout(shape: tuple[int, ...], axis: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns sizes and strides of a clip: one number for the whole tensor (axis -1) or for each index of `axis`."""
    sizes = [size if dim == axis else 1 for dim, size in enumerate(shape)]
    return tuple(sizes), tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
