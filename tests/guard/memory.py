# SPDX-License-Identifier: Apache-2.0
"""Buffers that end (or begin) exactly at a page without any permission, filled from a seed."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

PLACEMENTS = ("plain", "end", "begin")
_PAGE = mmap.PAGESIZE
_NONE, _READ_WRITE, _PRIVATE_ANONYMOUS = 0, 3, 0x22
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Arena:
    """Hands out buffers until it is closed. Two arenas of one seed are filled alike, wherever their buffers are placed."""

    def __init__(self, placement: str, seed: int) -> None:
        assert placement in PLACEMENTS
        self.placement = placement
        self._generator = torch.Generator().manual_seed(seed)
        self._mapped: list[tuple[int, int]] = []
        self._alive: list[Tensor] = []
        self.results: list[Tensor] = []

    def close(self) -> None:
        self._alive.clear()
        self.results.clear()
        for address, size in self._mapped:
            _libc.munmap(address, size)
        self._mapped.clear()

    def _empty(self, count: int, dtype: torch.dtype) -> Tensor:
        bytes_ = count * dtype.itemsize
        if self.placement == "plain":
            return torch.empty(count, dtype=dtype)
        inner = max(math.ceil(bytes_ / _PAGE), 1) * _PAGE
        base = _libc.mmap(None, inner + 2 * _PAGE, _NONE, _PRIVATE_ANONYMOUS, -1, 0)
        if base is None or base == ctypes.c_void_p(-1).value or _libc.mprotect(base + _PAGE, inner, _READ_WRITE):
            raise OSError(ctypes.get_errno(), "no memory for a guarded buffer")
        self._mapped.append((base, inner + 2 * _PAGE))
        start = base + _PAGE + (inner - bytes_ if self.placement == "end" else 0)
        return torch.frombuffer((ctypes.c_char * bytes_).from_address(start), dtype=dtype, count=count)

    def put(self, values: Tensor) -> int:
        """The address of a copy of these values."""
        buffer = self._empty(values.numel(), values.dtype)
        buffer.copy_(values.reshape(-1))
        self._alive.append(buffer)
        return buffer.data_ptr()

    def room(self, count: int, dtype: torch.dtype = torch.float32) -> int:
        """The address of a place for a result, which is compared when the call is over."""
        buffer = self._empty(count, dtype)
        buffer.view(torch.uint8).fill_(0x55)
        self.results.append(buffer)
        return buffer.data_ptr()

    def int8(self, count: int, least: int = -127) -> int:
        return self.put(torch.randint(least, 128, (count,), generator=self._generator).to(torch.int8))

    def floats(self, count: int, dtype: torch.dtype = torch.float32) -> int:
        return self.put((torch.randn(count, generator=self._generator) * 3.0).to(dtype))

    def positive(self, count: int) -> int:
        return self.put(torch.rand(count, generator=self._generator) + 0.5)

    def wide(self, count: int) -> int:
        """float64"""
        return self.put(torch.rand(count, generator=self._generator, dtype=torch.float64) + 0.5)

    def longs(self, values: Sequence[int]) -> int:
        return self.put(torch.tensor(list(values), dtype=torch.int64))

    def key(self) -> int:
        return self.longs([0x9D2C5680, 0xEFC60000])

    def bytes_(self, count: int) -> int:
        return self.put(torch.randint(0, 256, (count,), generator=self._generator).to(torch.uint8))
