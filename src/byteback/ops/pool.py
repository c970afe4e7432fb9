# SPDX-License-Identifier: Apache-2.0
"""Buffers that are used again: large results live in memory that returns to the pool when their storage dies.

glibc hands every block above 32 MB back to the system when it is freed, and a training step would page in the same hundreds
of megabytes anew each time. A block is lent to one storage at a time: a tensor, a view, a saved tensor or a numpy array keeps
that storage alive and the block out of reach, however long it lives. What lies idle is bounded by `limit`, and `offer` tells
the system that it may take it: it does so when memory is short, and until then the next use pages nothing in (to tell it takes
about a hundredth of a ResNet-18's step).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST = 1 << 20
"""Smaller blocks are left to malloc, which keeps them itself."""

_lock = threading.RLock()  # a storage may die, and return its block, in the middle of a request
_shelves: dict[int, list[mmap.mmap]] = {}  # idle blocks by size; sizes that were used last come last
_idle = 0
_offered: set[int] = set()  # idle blocks by identity, that the system may take the pages of
_lent = 0


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 8 << 30


limit = _physical_memory() // 4
"""Bytes that may lie idle; beyond them the sizes that were not asked for longest go back to the system."""


def empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised dense CPU tensor."""
    count = math.prod(shape)
    if count * dtype.itemsize < SMALLEST:
        return torch.empty_strided(shape, strides, dtype=dtype)
    flat = torch.frombuffer(_lend(_rounded(count * dtype.itemsize)), dtype=dtype, count=count)
    # In place: a view would keep its base, and a storage that Python has seen counts as shared, and autograd adds gradients in
    # place only into a tensor whose storage nobody else has.
    return flat.as_strided_(shape, strides)


def empty_like(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialised tensor that lies in memory as the dense tensor x does."""
    return empty(x.shape, x.stride(), dtype)


def _rounded(size: int) -> int:
    """The size of the block: at most an eighth more, so that images of varying sizes share buffers."""
    step = 1 << max(size.bit_length() - 4, 16)
    return -(-size // step) * step


class _Loan:
    """What a storage holds instead of memory: when the storage dies, so does this, and the block goes back on its shelf."""

    block: mmap.mmap

    def __del__(self) -> None:
        _take_back(self.block)


_loans: dict[int, type] = {}


def _lend(size: int) -> ctypes.Array[ctypes.c_char]:
    global _idle, _lent
    with _lock:
        shelf = _shelves.pop(size, [])
        _shelves[size] = shelf
        block = shelf.pop() if shelf else None
        _lent += size
        if block is not None:
            _idle -= size
            _offered.discard(id(block))
    if size not in _loans:
        _loans[size] = type("Loan", (_Loan, ctypes.c_char * size), {})
    block = block or _new(size)
    loan = _loans[size].from_buffer(block)  # type: ignore[attr-defined]
    loan.block = block
    return loan


def _new(size: int) -> mmap.mmap:
    """A block of its own for this process (Python's default would share it with forked children), in huge pages if it can."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(block, "MADV_HUGEPAGE")
    return block


def _advise(block: mmap.mmap, name: str) -> bool:
    """Tells the system something about a block, where it understands."""
    try:
        block.madvise(getattr(mmap, name))
    except (AttributeError, OSError):
        return False
    return True


def _take_back(block: mmap.mmap) -> None:
    global _idle, _lent
    with _lock:
        size = len(block)
        _lent -= size
        _idle += size
        _shelves.setdefault(size, []).append(block)
        if _idle > limit:
            _shrink(limit)


def _shrink(target: int) -> None:
    """Gives idle blocks back to the system until `target` bytes are left, long unused sizes first."""
    global _idle
    for size in list(_shelves):
        shelf = _shelves[size]
        while shelf and _idle > target:
            _offered.discard(id(shelf.pop()))  # the map is closed with its last reference
            _idle -= size
        if not shelf:
            del _shelves[size]


def offer() -> None:
    """Leaves the pages of idle blocks to the system, which takes them when memory is short; until then they are used again."""
    with _lock:
        for block in (block for shelf in _shelves.values() for block in shelf if id(block) not in _offered):
            if _advise(block, "MADV_FREE"):
                _offered.add(id(block))


def held() -> int:
    """Bytes of all blocks that the system cannot have: lent ones, and idle ones that were not offered."""
    return _lent + idle()


def idle() -> int:
    """Bytes of the blocks that nobody uses now and that the system cannot have either."""
    with _lock:
        return _idle - sum(len(block) for shelf in _shelves.values() for block in shelf if id(block) in _offered)


def release() -> None:
    """Gives idle blocks back to the system; those in use come back to the pool when they die."""
    with _lock:
        _shrink(0)
