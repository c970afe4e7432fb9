# SPDX-License-Identifier: Apache-2.0
"""Global and shared memory. An access out of bounds or not aligned is an error; bank conflicts are counted."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray

GLOBAL = 1 << 33
"""The first address of global memory: offsets in 32 bits do not reach it by accident."""

POISON = 0x55  # what a copy that has not arrived looks like
_GAP = 256


class Fault(Exception):
    """The program did what a GPU would punish, or what gives other bits."""


class Global:
    """The storages of tensors, with gaps between them that nobody may touch."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.start: dict[int, int] = {}
        self._bytes: list[tuple[int, Array]] = []
        end = _GAP
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.start:
                raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
                self.start[storage.data_ptr()] = end
                self._bytes.append((end, raw))
                end += -(-raw.size // _GAP) * _GAP + _GAP
        self.data = np.zeros(end, np.uint8)
        self.owned = np.zeros(end, bool)
        for at, raw in self._bytes:
            self.data[at : at + raw.size] = raw
            self.owned[at : at + raw.size] = True

    def address(self, tensor: Tensor) -> int:
        return GLOBAL + self.start[tensor.untyped_storage().data_ptr()] + tensor.storage_offset() * tensor.element_size()

    def write_back(self) -> None:
        """Copies what the program wrote to the tensors."""
        for at, raw in self._bytes:
            raw[:] = self.data[at : at + raw.size]

    def check(self, address: Array, size: int) -> Array:
        """Returns the offsets of addresses that may be accessed."""
        at = address - GLOBAL
        inside = (at >= 0) & (at + size <= self.data.size)
        if not inside.all() or not (self.owned[at] & self.owned[at + size - 1]).all():
            raise Fault("global memory out of bounds")
        if (at % size).any():
            raise Fault(f"an access of {size} bytes to global memory is not aligned")
        return at


class Shared:
    """The shared memory of each program of the grid."""

    def __init__(self, programs: int, size: int) -> None:
        self.data = np.full((programs, max(size, 1)), 0xCC, np.uint8)
        self.waves: dict[str, list[int]] = {}  # kind of access: wavefronts it took, and would take without conflicts

    def check(self, address: Array, size: int) -> Array:
        if (address < 0).any() or (address + size > self.data.shape[1]).any():
            raise Fault("shared memory out of bounds")
        if (address % size).any():
            raise Fault(f"an access of {size} bytes to shared memory is not aligned")
        return address

    def meter(self, kind: str, addresses: Array, size: int) -> None:
        """Counts the wavefronts of accesses: rows of addresses that the hardware serves at once without conflicts.

        There are 32 banks of 4 bytes. Different words of one bank are served one after the other.
        """
        words = (addresses[:, :, None] + np.arange(0, max(size, 4), 4)).reshape(len(addresses), -1) // 4
        words = np.sort(words, 1)
        first = np.ones(words.shape, bool)
        first[:, 1:] = words[:, 1:] != words[:, :-1]
        banks = np.zeros((len(words), 32), np.int64)
        np.add.at(banks, (np.nonzero(first)[0], words[first] % 32), 1)
        count = self.waves.setdefault(kind, [0, 0])
        count[0] += int(banks.max(1).sum())
        count[1] += len(words)
