# SPDX-License-Identifier: Apache-2.0
"""From tensors to addresses: the only place where a tensor becomes a number that the native library trusts.

A kernel gets an address and reads so many elements of one type from there on. It cannot see whether they are there, so every
tensor is checked here for its dtype, its device, its layout and its number of elements:

    flat    dense in the order of its axes: vectors, scales, sums, masks
    last    (N, C, ...), dense with its channels last: images
    dense   either of the two, where the caller tells the kernel which
    part    some channels of a wider image
    known   not checked: the key of a plan has proved all of it, or the tensor was made for this call (`new`, allocator.py)

Each returns 0 for None. A tensor that does not fit is an error: callers copy unusual layouts and refuse wrong arguments
before, with the operator's name in the message. An address does not keep its tensor alive, so a temporary such as
`key.contiguous()` must have a name that lives until the kernel is done; tests/test_addresses.py looks for calls that forget it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from byteback.ops.contract import layout

CPU = torch.device("cpu")
"""Where the native library reads and writes: results are made there, whatever torch.set_default_device says."""

_empty = torch.empty  # bound once: after a large layer every look-up in PyTorch's module is a miss of the cache
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_flat(x: Tensor, dtype: torch.dtype, count: int) -> bool:
    """Whether x is `count` dense numbers of this type on the CPU.

    >>> is_flat(torch.zeros(3), torch.float32, 3), is_flat(torch.zeros(6)[::2], torch.float32, 3)
    (True, False)
    """
    return x.dtype is dtype and x.is_cpu and x.numel() == count and x.is_contiguous()


def is_last(x: Tensor, dtype: torch.dtype, count: int) -> bool:
    """Whether x (N, C, ...) is `count` dense numbers of this type on the CPU, with its channels last."""
    return x.dtype is dtype and x.is_cpu and x.numel() == count and _is_last(x)


def is_part(x: Tensor, dtype: torch.dtype, pitch: int) -> bool:
    """Whether x (N, C, ...) is some channels of a dense CPU image with its channels last, `pitch` of them for each pixel."""
    return x.dtype is dtype and x.is_cpu and layout.is_part(x, pitch)


def _is_last(x: Tensor) -> bool:
    rank = x.dim()
    if rank in _FORMATS:
        return x.is_contiguous(memory_format=_FORMATS[rank])
    return x.is_contiguous() if rank == 2 else x.movedim(1, -1).is_contiguous()


def flat(x: Tensor | None, dtype: torch.dtype, count: int) -> int:
    """The address of `count` dense numbers."""
    if x is None:
        return 0
    # As in is_flat, written out: this runs some thousand times in a training step.
    if x.dtype is dtype and x.is_cpu and x.numel() == count and x.is_contiguous():
        return x.data_ptr() or _nothing_there(x)
    _refuse(x, dtype, count, "dense")


def last(x: Tensor | None, dtype: torch.dtype, count: int) -> int:
    """The address of a dense image with its channels last."""
    if x is None:
        return 0
    if x.dtype is dtype and x.is_cpu and x.numel() == count and _is_last(x):
        return x.data_ptr() or _nothing_there(x)
    _refuse(x, dtype, count, "dense with its channels last")


def dense(x: Tensor, dtype: torch.dtype, count: int) -> int:
    """The address of a dense tensor, with its channels last or not."""
    if x.dtype is dtype and x.is_cpu and x.numel() == count and (x.is_contiguous() or _is_last(x)):
        return x.data_ptr() or _nothing_there(x)
    _refuse(x, dtype, count, "dense")


def part(x: Tensor | None, dtype: torch.dtype, count: int, pitch: int) -> int:
    """The address of some channels of an image that has `pitch` of them."""
    if x is None:
        return 0
    if x.numel() == count and is_part(x, dtype, pitch):
        return x.data_ptr() or _nothing_there(x)
    _refuse(x, dtype, count, f"a part of an image of {pitch} channels, channels last")


def new(shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised dense CPU tensor, for a kernel to fill.

    >>> new((1, 3), torch.int64).shape
    torch.Size([1, 3])
    """
    return _empty(shape, dtype=dtype, device=CPU)


def known(x: Tensor | None) -> int:
    """The address of a tensor that needs no check; see the top of this file."""
    return 0 if x is None else x.data_ptr()


def places(tensors: Sequence[Tensor | None]) -> list[int]:
    """Where tensors are, to compare with where they were: those that have not moved need no second check."""
    return [0 if x is None else x.data_ptr() for x in tensors]


def _refuse(x: Tensor, dtype: torch.dtype, count: int, how: str) -> NoReturn:
    error = TypeError if x.dtype is not dtype else ValueError
    raise error(
        f"native kernel: it was given {x.numel()} numbers of {x.dtype} on {x.device}, with shape {tuple(x.shape)} and strides "
        f"{x.stride()}, but it reads {count} numbers of {dtype} on cpu, {how}; it would read memory that is not the tensor's. "
        "Pass a dense copy of this dtype."
    )


def _nothing_there(x: Tensor) -> int:
    if x.numel():
        raise ValueError(
            f"native kernel: it was given a tensor of shape {tuple(x.shape)} without memory, as fake tensors are, but it reads "
            "numbers. Pass a tensor that has them."
        )
    return 0
