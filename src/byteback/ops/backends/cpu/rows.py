# SPDX-License-Identifier: Apache-2.0
"""How the native library reads a float tensor (N, C, ...): as rows of channels, dense. Others are copied first."""

from __future__ import annotations

import math
from functools import lru_cache

from torch import Tensor

from byteback.ops.contract import layout


@lru_cache(maxsize=4096)
def _rows_of(shape: tuple[int, ...], strides: tuple[int, ...], per_sample: bool) -> tuple[bool, tuple[int, ...]]:
    """Whether a tensor is channels last, and csrc/core/elementwise.h's Rows: outer, inner, channels and their strides."""
    n, c = shape[:2]
    pixels = math.prod(shape[2:])
    if not layout.is_last_dense(shape, strides):
        return False, (n, pixels, c, pixels * c, 1, pixels)
    return True, ((n, pixels, c, pixels * c, c, 1) if per_sample else (1, n * pixels, c, 0, c, 1))


def rows(x: Tensor, per_sample: bool = False) -> tuple[Tensor, tuple[int, ...]]:
    """x, copied if it must be, and its layout."""
    last, numbers = _rows_of(x.shape, x.stride(), per_sample)
    return (x if last else x.contiguous()), numbers


def strides(per_scale: Tensor) -> tuple[int, int]:
    """(per sample, per channel) strides of a dense clip or scale (N or 1, C or 1, 1, ...)."""
    return (per_scale.shape[1] if per_scale.shape[0] > 1 else 0), (1 if per_scale.shape[1] > 1 else 0)


@lru_cache(maxsize=4096)
def clip_layout(shape: tuple[int, ...], axis: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of one float for the whole tensor (axis -1) or for each index of `axis`."""
    sizes = [size if dim == axis else 1 for dim, size in enumerate(shape)]
    return tuple(sizes), tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
