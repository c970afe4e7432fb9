# SPDX-License-Identifier: Apache-2.0
"""Memory formats: PyTorch's rule for the output of a convolution, so that real and fake kernels use the same.

The output is channels_last if the input or the weight is, otherwise contiguous. Ambiguous shapes (one channel, one pixel) are
treated as contiguous, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(x: Tensor) -> bool:
    """Whether PyTorch would suggest channels_last for this tensor."""
    return lies_last(x.shape, x.stride())


def lies_last(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns is_channels_last for a tensor of these sizes and strides."""
    if len(sizes) not in _CHANNELS_LAST or strides[1] == 0:
        return False
    least = 0
    for dim in (1, *range(len(sizes) - 1, 1, -1), 0):
        if strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(sizes[dim], 1)
    return True


def is_last_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor (N, C, ...) is stored densely in the order N, ..., C.

    >>> is_last_dense((2, 3, 5), (15, 1, 3)), is_last_dense((2, 3, 5), (15, 5, 1)), is_last_dense((2, 1, 5), (5, 5, 1))
    (True, False, True)
    """
    expected = 1
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[dim] != 1 and strides[dim] != expected:
            return False
        expected *= shape[dim]
    return True


def is_part(x: Tensor, pitch: int) -> bool:
    """Whether x (N, C, ...) is a slice of the channels of a dense channels-last tensor that has `pitch` channels."""
    if x.shape[1] > pitch or (x.shape[1] > 1 and x.stride(1) != 1):
        return False
    step = pitch
    for axis in (*range(x.dim() - 1, 1, -1), 0):
        if x.shape[axis] > 1 and x.stride(axis) != step:
            return False
        step *= x.shape[axis]
    return True


def empty_like_product(shape: list[int], *operands: Tensor) -> Tensor:
    """Returns an uninitialized float32 result of a product, in the memory format that PyTorch would use."""
    # For an empty batch the result of PyTorch is contiguous, whatever the layout of the operands.
    empty = any(operand.numel() == 0 for operand in operands)
    last = not empty and any(is_channels_last(operand) for operand in operands)
    memory_format = _CHANNELS_LAST[len(shape)] if last else torch.contiguous_format
    return torch.empty(shape, dtype=torch.float32, device=operands[0].device, memory_format=memory_format)


def dense_strides(shape: list[int], channels_last: bool) -> tuple[int, ...]:
    """Returns the strides of a dense tensor of this shape, contiguous or channels last.

    >>> dense_strides([2, 3, 4, 5], True)
    (60, 1, 15, 3)
    """
    order = list(range(len(shape) - 1, -1, -1))
    if channels_last and len(shape) in _CHANNELS_LAST:
        order = [1, *range(len(shape) - 1, 1, -1), 0]
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def channels_last(x: Tensor) -> Tensor:
    """Returns x stored densely as (N, ..., C), copied only if needed."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def last_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a dense channels-last tensor (N, C, ...) of any rank.

    >>> last_strides((2, 3, 4, 5)), last_strides((2, 3, 4))
    ((60, 1, 15, 3), (12, 1, 3))
    """
    order = dense_strides([size[0], *size[2:], size[1]], False)
    return order[0], order[-1], *order[1:-1]
