# SPDX-License-Identifier: Apache-2.0
"""Buffers that are used again: large results live in memory that returns to the pool when their storage dies.

glibc hands every block above 32 MB back to the system when it is freed, and a training step would page in the same hundreds
of megabytes anew each time. A block is lent to one storage at a time: a tensor, a view, a saved tensor or a numpy array keeps
that storage alive and the block out of reach, however long it lives. All sizes share one heap (csrc/core/pool.cpp), so a step
holds little more than the most that was lent at once. What lies idle is bounded by `limit`, and `offer` tells
the system that it may take it: it does so when memory is short, and until then the next use pages nothing in (to tell it takes
about a hundredth of a ResNet-18's step).

The blocks are kept by the native library (csrc/core/pool.cpp), which hands them out as DLPack capsules: a call takes 1 µs;
bookkeeping in Python took 4 µs, and 50 µs once a large layer had swept it from the caches. Blocks below 1 MB are malloc's,
which keeps them itself. Without the native library nothing is pooled.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from byteback.ops.backends.cpu import library
from byteback.ops.backends.cpu.addresses import CPU

_native = library.native
tensor_of = torch._C._from_dlpack
"""The tensor of a capsule that the native library made."""
MOST_AXES = 8
"""Of a tensor that the native library makes (csrc/bindings/bindings_pool.cpp)."""
_TYPES = {torch.float32: (2, 32), torch.bfloat16: (4, 16), torch.int8: (0, 8), torch.uint8: (1, 8)}  # code and bits in DLPack


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 8 << 30


limit = _physical_memory() // 4
"""Bytes that may lie idle; beyond them the longest unused ranges go back to the system."""

_lasts = False


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """What `empty` makes within is needed beyond the step, as gradients of weights are: it lies apart from all that is not.

    Only a hint, which another thread may see too.
    """
    global _lasts
    _lasts = True
    try:
        yield
    finally:
        _lasts = False


def empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised dense tensor of float32, bfloat16, int8 or uint8; only memory of the CPU is pooled."""
    if _native is None or device != CPU or len(shape) > MOST_AXES:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    # Nobody but the tensor has its storage: autograd adds gradients in place only into such ones.
    return tensor_of(_native.pool_lend(shape, strides, *_TYPES[dtype], limit, _lasts))


def empty_like(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialised tensor that lies in memory as the dense tensor x does."""
    return empty(x.shape, x.stride(), dtype, x.device)


def offer() -> None:
    """Leaves the pages of idle blocks to the system, which takes them when memory is short; until then they are used again."""
    if _native is not None:
        _native.pool_offer()


def held() -> int:
    """Bytes of all blocks that the system cannot have: lent ones, and idle ones that were not offered."""
    return 0 if _native is None else sum(_native.pool_sizes())


def idle() -> int:
    """Bytes of the blocks that nobody uses now and that the system cannot have either."""
    return 0 if _native is None else _native.pool_sizes()[1]


def release() -> None:
    """Gives idle blocks back to the system; those in use come back to the pool when they die."""
    if _native is not None:
        _native.pool_release()
