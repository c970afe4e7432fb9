# SPDX-License-Identifier: Apache-2.0
"""Buffers that are used again: large results live in storages that the pool keeps when nobody else holds them any more.

glibc hands every block above 32 MB back to the system when it is freed, and a training step would page in the same hundreds
of megabytes anew each time. A storage is free when the pool's own reference is the only one left, so a tensor, a view, a
saved tensor or a numpy array keeps it out of reach, however long it lives. What lies idle is bounded by `limit`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST = 1 << 20
"""Smaller blocks are left to malloc, which keeps them itself."""

_use_count = getattr(torch._C, "_storage_Use_Count", None)
_lock = threading.Lock()


class _Shelf:
    """Storages of one size, each with the address that it had when it was made."""

    def __init__(self) -> None:
        self.storages: list[tuple[torch.UntypedStorage, int]] = []
        self.used_at = 0  # the request that last asked for this size


_shelves: dict[int, _Shelf] = {}
_requests = 0
_total = 0


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 8 << 30


limit = _physical_memory() // 2
"""Bytes that the pool may hold in all, used and idle; beyond them the sizes that were not asked for longest go first."""


def empty(shape: Sequence[int], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised dense CPU tensor."""
    size = math.prod(shape) * dtype.itemsize
    if size < SMALLEST or _use_count is None:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return torch.empty(0, dtype=dtype).set_(_storage(_rounded(size)), 0, shape, strides)


def empty_like(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialised tensor that lies in memory as the dense tensor x does."""
    return empty(x.shape, x.stride(), dtype)


def _rounded(size: int) -> int:
    """The size of the shelf: at most an eighth more, so that images of varying sizes share buffers."""
    step = 1 << max(size.bit_length() - 4, 16)
    return -(-size // step) * step


def _is_free(storage: torch.UntypedStorage, address: int) -> bool:
    return _use_count(storage._cdata) == 1 and storage.data_ptr() == address  # type: ignore[misc]


def _storage(size: int) -> torch.UntypedStorage:
    global _requests, _total
    with _lock:
        _requests += 1
        shelf = _shelves.setdefault(size, _Shelf())
        shelf.used_at = _requests
        for index, (storage, address) in enumerate(shelf.storages):
            if _is_free(storage, address):
                # To the end: the ones in front have been free longest next time, and are found at once.
                shelf.storages.append(shelf.storages.pop(index))
                return storage
        storage = torch.UntypedStorage(size)
        shelf.storages.append((storage, storage.data_ptr()))
        _total += size
        if _total > limit:
            _shrink(limit)
        return storage


def _shrink(target: int) -> None:
    """Lets go of idle storages, and of those that somebody moved or resized, until `target` bytes are left."""
    global _total
    for size, shelf in sorted(_shelves.items(), key=lambda item: item[1].used_at):
        kept = []
        for storage, address in shelf.storages:
            moved = storage.data_ptr() != address
            if _total > target and (moved or _is_free(storage, address)) and shelf.used_at != _requests:
                _total -= size
            else:
                kept.append((storage, address))
        shelf.storages = kept
        if not kept:
            del _shelves[size]


def held() -> int:
    """Bytes of all storages that the pool knows of, used and idle."""
    return _total


def idle() -> int:
    """Bytes of the storages that nobody uses now."""
    with _lock:
        free = [size for size, shelf in _shelves.items() for entry in shelf.storages if _is_free(*entry)]
        return sum(free)


def release() -> None:
    """Gives idle buffers back to the system; those in use follow when they die."""
    global _requests, _total
    with _lock:
        _requests += 1
        _shrink(0)
        # What is in use is forgotten: it dies with its tensors.
        _shelves.clear()
        _total = 0
