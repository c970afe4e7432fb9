# SPDX-License-Identifier: Apache-2.0
"""A memory pool for large results. A block returns to the pool when its storage is freed.

glibc returns every block above 32 MB to the system when it is freed, so a training step would page in the same hundreds of
megabytes each time. A block belongs to one storage at a time. While a tensor, a view, a saved tensor or a numpy array keeps
that storage alive, the block is not used again. All sizes share one heap (csrc/core/pool.cpp), so a step needs little more
than the most that was in use at once. `limit` is the maximum size of unused blocks. `offer` tells the system that it may take
them. It does so when memory is short; until then the next use needs no page faults. (The call takes about 1 % of a training
step of ResNet-18.)

The native library stores the blocks (csrc/core/pool.cpp) and returns them as DLPack capsules. A call takes 1 µs; the same in
Python took 4 µs, and 50 µs after a large layer had evicted it from the caches. Blocks below 1 MB come from malloc, which
reuses them itself. Without the native library there is no pool.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from byteback.ops.backends.cpu import library
from byteback.ops.backends.cpu.addresses import CPU

_native = library.native
tensor_of = torch._C._from_dlpack
"""Returns the tensor of a capsule of the native library."""
MOST_AXES = 8
"""The maximum rank of a tensor that the native library creates (csrc/bindings/bindings_pool.cpp)."""
_TYPES = {torch.float32: (2, 32), torch.bfloat16: (4, 16), torch.int8: (0, 8), torch.uint8: (1, 8)}  # code and bits in DLPack


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 8 << 30


limit = _physical_memory() // 4
"""The maximum number of unused bytes. Above it, the ranges that were unused longest are returned to the system."""


def empty(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device, lasts: bool = False
) -> Tensor:
    """Returns an uninitialized dense tensor of float32, bfloat16, int8 or uint8. Only CPU memory is pooled.

    `lasts`: it is needed after the step, as gradients of weights are. Such tensors have a heap of their own.
    """
    if _native is None or device != CPU or len(shape) > MOST_AXES:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    # Only the tensor references its storage: autograd accumulates gradients in place only into such tensors.
    return tensor_of(_native.pool_lend(shape, strides, *_TYPES[dtype], limit, lasts))


def empty_like(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns an uninitialized tensor with the sizes and strides of the dense tensor x."""
    return empty(x.shape, x.stride(), dtype, x.device)


def offer() -> None:
    """Allows the system to take the pages of unused blocks when memory is short. Until then they are reused."""
    if _native is not None:
        _native.pool_offer()


def held() -> int:
    """Returns the bytes of all blocks that the system cannot take: used ones, and unused ones that were not offered."""
    return 0 if _native is None else sum(_native.pool_sizes())


def idle() -> int:
    """Returns the bytes of the unused blocks that were not offered to the system."""
    return 0 if _native is None else _native.pool_sizes()[1]


def release() -> None:
    """Returns unused blocks to the system. Used blocks return to the pool when they are freed."""
    if _native is not None:
        _native.pool_release()
