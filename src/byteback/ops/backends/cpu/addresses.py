# SPDX-License-Identifier: Apache-2.0
"""Checks tensors and returns their addresses for the native library. No other file does this.

A kernel gets an address and reads a number of elements of one type. It cannot check that they exist, so the dtype, device,
layout and number of elements of every tensor are checked here:

    flat    contiguous: vectors, scales, sums, masks
    last    (N, C, ...), dense and channels last: images
    dense   either of the two; the caller tells the kernel which
    part    some channels of a wider image
    known   not checked: the key of a plan proves all of it, or the tensor was created for this call (`new`, allocator.py)

Each returns 0 for None. A wrong tensor is an error here: before, callers copy other layouts and raise errors for wrong
arguments with the name of the operator. An address does not keep its tensor alive, so a temporary such as `key.contiguous()`
must be a variable that exists until the kernel has finished. tests/test_addresses.py finds calls without such a variable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from byteback.ops.contract import layout

CPU = torch.device("cpu")
"""The device of the native library. Results are created on it for any torch.set_default_device."""

KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""The number of a dtype in which floats are stored: enum class Stored in csrc/block/norm.h."""

_empty = torch.empty  # bound once: after a large layer every attribute look-up in torch is a cache miss
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_flat(x: Tensor, dtype: torch.dtype, count: int) -> bool:
    """Whether x has `count` dense numbers of this type on the CPU.

    >>> is_flat(torch.zeros(3), torch.float32, 3), is_flat(torch.zeros(6)[::2], torch.float32, 3)
    (True, False)
    """
    return x.dtype is dtype and x.is_cpu and x.numel() == count and x.is_contiguous()


def is_last(x: Tensor, dtype: torch.dtype, count: int) -> bool:
    """Whether x (N, C, ...) has `count` dense numbers of this type on the CPU, channels last."""
    return x.dtype is dtype and x.is_cpu and x.numel() == count and _is_last(x)


def is_part(x: Tensor, dtype: torch.dtype, pitch: int) -> bool:
    """Whether x (N, C, ...) is some channels of a dense channels-last CPU image with `pitch` channels."""
    return x.dtype is dtype and x.is_cpu and layout.is_part(x, pitch)


def _is_last(x: Tensor) -> bool:
    rank = x.dim()
    if rank in _FORMATS:
        return x.is_contiguous(memory_format=_FORMATS[rank])
    return x.is_contiguous() if rank == 2 else x.movedim(1, -1).is_contiguous()


def flat(x: Tensor | None, dtype: torch.dtype, count: int) -> int:
    """Returns the address of `count` dense numbers."""
    if x is None:
        return 0
    # Same as is_flat, inlined because this runs some thousand times in a training step.
    if x.dtype is dtype and x.is_cpu and x.numel() == count and x.is_contiguous():
        return x.data_ptr() or _nothing_there(x)
    _refuse(x, dtype, count, "dense")


def last(x: Tensor | None, dtype: torch.dtype, count: int) -> int:
    """Returns the address of a dense channels-last image."""
    if x is None:
        return 0
    if x.dtype is dtype and x.is_cpu and x.numel() == count and _is_last(x):
        return x.data_ptr() or _nothing_there(x)
    _refuse(x, dtype, count, "dense with its channels last")


def dense(x: Tensor, dtype: torch.dtype, count: int) -> int:
    """Returns the address of a dense tensor, channels last or contiguous."""
    if x.dtype is dtype and x.is_cpu and x.numel() == count and (x.is_contiguous() or _is_last(x)):
        return x.data_ptr() or _nothing_there(x)
    _refuse(x, dtype, count, "dense")


def part(x: Tensor | None, dtype: torch.dtype, count: int, pitch: int) -> int:
    """Returns the address of some channels of an image with `pitch` channels."""
    if x is None:
        return 0
    if x.numel() == count and is_part(x, dtype, pitch):
        return x.data_ptr() or _nothing_there(x)
    _refuse(x, dtype, count, f"a part of an image of {pitch} channels, channels last")


def new(shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns an uninitialized dense CPU tensor, for a kernel to fill.

    >>> new((1, 3), torch.int64).shape
    torch.Size([1, 3])
    """
    return _empty(shape, dtype=dtype, device=CPU)


def known(x: Tensor | None) -> int:
    """Returns the address of a tensor that needs no check. The docstring of this file explains it."""
    return 0 if x is None else x.data_ptr()


def places(tensors: Sequence[Tensor | None]) -> list[int]:
    """Returns the addresses of tensors, to compare with earlier ones: tensors that have not moved need no second check."""
    return [0 if x is None else x.data_ptr() for x in tensors]


def _refuse(x: Tensor, dtype: torch.dtype, count: int, how: str) -> NoReturn:
    error = TypeError if x.dtype is not dtype else ValueError
    raise error(
        f"native kernel: got {x.numel()} numbers of {x.dtype} on {x.device}, with shape {tuple(x.shape)} and strides "
        f"{x.stride()}, but it reads {count} numbers of {dtype} on cpu, {how}; it would read memory outside the tensor. "
        "Pass a dense copy of this dtype."
    )


def _nothing_there(x: Tensor) -> int:
    if x.numel():
        raise ValueError(
            f"native kernel: got a tensor of shape {tuple(x.shape)} without memory, such as a fake tensor, but it reads "
            "values. Pass a tensor with memory."
        )
    return 0
