# SPDX-License-Identifier: Apache-2.0
"""wgmma of sm_90: four warps multiply tiles of shared memory. It is run at once, so a missing wait is not noticed."""

from __future__ import annotations

import re

import numpy as np

from gpu_check.ptx.lanes import Lanes, opcode
from gpu_check.ptx.memory import Array, Fault
from gpu_check.ptx.program import Instruction
from gpu_check.ptx.warps import bytes_of

_THREAD = np.arange(128)
_ROW, _COLUMN = 16 * (_THREAD // 32) + _THREAD % 32 // 4, 2 * (_THREAD % 4)


@opcode(r"wgmma\.(fence|commit_group|wait_group)\.sync\.aligned")
def order(lanes: Lanes, made: Instruction) -> None:
    """Nothing is under way."""


@opcode(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.s32\.s8\.s8")
def multiply_tiles(lanes: Lanes, made: Instruction) -> None:
    """d (64 x N) = a (64 x 32) · b (32 x N), added to d if the fourth operand is true. Sums wrap."""
    groups = lanes.active.reshape(-1, 128)
    if (groups.any(1) != groups.all(1)).any():
        raise Fault("an instruction of four warps runs on a part of their threads")
    active, names = groups[:, 0], made.names(0)
    width = re.search(r"n(\d+)k", made.opcode)
    assert width is not None
    held = len(made.names(1)) > 1
    a = _registers(lanes, made.names(1))[active] if held else _tile(lanes, made.name(1), 64, active)
    b = _tile(lanes, made.name(2), int(width[1]), active)
    product = np.zeros((len(active), 64, int(width[1])), np.int32)
    product[active] = a @ b.swapaxes(1, 2)
    adds = lanes.read(made.name(3), "pred")
    for index, name in enumerate(names):
        terms = product[:, _ROW + 8 * (index >> 1 & 1), 8 * (index >> 2) + _COLUMN + (index & 1)].reshape(-1)
        lanes.write(name, terms + np.where(adds, lanes.read(name, "s32"), np.int32(0)))


def _registers(lanes: Lanes, names: tuple[str, ...]) -> Array:
    """Returns a (groups, 64, 32) from registers: each warp holds 16 rows, as for mma.sync."""
    found = np.zeros((lanes.count // 128, 64, 32), np.float32)
    for index, name in enumerate(names):
        column = 4 * (_THREAD % 4)[:, None] + 16 * (index >> 1) + np.arange(4)
        found[:, (_ROW + 8 * (index & 1))[:, None], column] = bytes_of(lanes, name, 128)
    return found


def _tile(lanes: Lanes, descriptor: str, rows: int, active: Array) -> Array:
    """Returns int8 (groups, rows, 32) as float32. A descriptor has the start, the stride of eight rows and the swizzle."""
    d = lanes.read(descriptor, "u64").reshape(-1, 128)[active, 0].astype(object)
    block = lanes.block.reshape(-1, 128)[active, 0]
    start = np.array([(value & 0x3FFF) << 4 for value in d], np.int64)[:, None, None]
    stride = np.array([(value >> 32 & 0x3FFF) << 4 for value in d], np.int64)[:, None, None]
    kinds = {value >> 62 for value in d}
    if kinds - {1, 2, 3} or len(kinds) != 1:
        raise NotImplementedError(f"wgmma with the swizzles {kinds}")
    width, mask = {1: (128, 7), 2: (64, 3), 3: (32, 1)}[kinds.pop()]
    row, column = np.arange(rows)[:, None], np.arange(32)
    at = start + row // 8 * stride + row % 8 * width + column
    at = lanes.shared.check(at ^ ((at >> 7 & mask) << 4), 1)
    return lanes.shared.data[block[:, None, None], at].view(np.int8).astype(np.float32)
