# SPDX-License-Identifier: Apache-2.0
"""Instructions of a warp of 32 threads: shuffles, reductions, ldmatrix, stmatrix and mma.sync."""

from __future__ import annotations

import numpy as np

from gpu_check.ptx.lanes import TYPES, Lanes, opcode
from gpu_check.ptx.memory import Array
from gpu_check.ptx.program import Instruction

_LANE = np.arange(32)
_ROW, _QUAD = _LANE // 4, _LANE % 4  # where a thread's numbers are in a tile of a product


@opcode(r"shfl\.sync\.(bfly|idx)\.b32")
def shuffle(lanes: Lanes, made: Instruction) -> None:
    """Only of the whole warp, which is what the fourth operand 31 says."""
    lanes.warps()
    if made.name(3) != "31" or made.name(4) != "-1":
        raise NotImplementedError(f"a shuffle of a part of a warp: {made.text}")
    x, by = (lanes.read(made.name(index), "u32").reshape(-1, 32) for index in (1, 2))
    source = _LANE ^ by if made.has("bfly") else by & 31
    found = np.take_along_axis(x, source.astype(np.int64), 1).reshape(-1)
    target, _, whole = made.name(0).partition("|")
    lanes.write(target, found)
    if whole:
        lanes.write(whole, np.ones(lanes.count, bool))


_REDUCE = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}


@opcode(r"redux\.sync\.(add|min|max|and|or)\.[sub]32")
def reduce(lanes: Lanes, made: Instruction) -> None:
    lanes.warps()
    x = lanes.read(made.name(1), made.kind).reshape(-1, 32)
    found = _REDUCE[made.opcode.split(".")[2]].reduce(x, axis=1, dtype=TYPES[made.kind])
    lanes.write(made.name(0), np.repeat(found, 32))


@opcode(r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16")
def load_matrix(lanes: Lanes, made: Instruction) -> None:
    """Each thread gives the address of a row of 16 bytes; eight rows are a tile, and each register takes one tile."""
    active, names = lanes.warps(), made.names(0)
    rows = lanes.address(made.name(1)).reshape(-1, 32)[active][:, : 8 * len(names)]
    rows = lanes.shared.check(rows, 16).reshape(-1, len(names), 8)
    lanes.shared.meter("ldmatrix", rows[:8].reshape(-1, 8), 16)
    block = lanes.block.reshape(-1, 32)[active, 0]
    data = lanes.shared.data[block[:, None, None, None], rows[..., None] + np.arange(16)]
    tiles = np.ascontiguousarray(data).view(np.uint16)  # (warps, tiles, 8, 8)
    if made.has("trans"):
        tiles = tiles.swapaxes(2, 3)
    pairs = np.ascontiguousarray(tiles).view(np.uint32).reshape(len(block), len(names), 32)
    for index, name in enumerate(names):
        found = np.zeros((len(active), 32), np.uint32)
        found[active] = pairs[:, index]
        lanes.write(name, found.reshape(-1))


@opcode(r"stmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16")
def store_matrix(lanes: Lanes, made: Instruction) -> None:
    """The reverse of ldmatrix."""
    active, names = lanes.warps(), made.names(1)
    rows = lanes.address(made.name(0)).reshape(-1, 32)[active][:, : 8 * len(names)]
    rows = lanes.shared.check(rows, 16).reshape(-1, len(names), 8)
    lanes.shared.meter("stmatrix", rows[:8].reshape(-1, 8), 16)
    block = lanes.block.reshape(-1, 32)[active, 0]
    pairs = np.stack([lanes.read(name, "u32").reshape(-1, 32)[active] for name in names], 1)
    tiles = np.ascontiguousarray(pairs).view(np.uint16).reshape(-1, len(names), 8, 8)
    if made.has("trans"):
        tiles = tiles.swapaxes(2, 3)
    data = np.ascontiguousarray(tiles).view(np.uint8)
    lanes.shared.data[block[:, None, None, None], rows[..., None] + np.arange(16)] = data


@opcode(r"mma\.sync\.aligned\.m16n8k32\.row\.col(\.satfinite)?\.s32\.s8\.s8\.s32")
def multiply_tiles(lanes: Lanes, made: Instruction) -> None:
    """d (16 x 8) = a (16 x 32) · b (32 x 8) + c. float32 holds the sums of 32 products exactly."""
    lanes.warps()
    warps = lanes.count // 32
    a, b = np.zeros((warps, 16, 32), np.float32), np.zeros((warps, 32, 8), np.float32)
    four = np.arange(4)
    for index, name in enumerate(made.names(1)):
        a[:, (_ROW + 8 * (index & 1))[:, None], 4 * _QUAD[:, None] + 16 * (index >> 1) + four] = bytes_of(lanes, name, 32)
    for index, name in enumerate(made.names(2)):
        b[:, 4 * _QUAD[:, None] + 16 * index + four, _ROW[:, None]] = bytes_of(lanes, name, 32)
    product = (a @ b).astype(np.int64)
    found = []
    for index, name in enumerate(made.names(3)):
        terms = product[:, _ROW + 8 * (index >> 1), 2 * _QUAD + (index & 1)].reshape(-1)
        total = terms + lanes.read(name, "s32")
        found.append(np.clip(total, -(2**31), 2**31 - 1) if made.has("satfinite") else total)
    for name, total in zip(made.names(0), found, strict=True):
        lanes.write(name, total.astype(np.int32))


def bytes_of(lanes: Lanes, name: str, threads: int) -> Array:
    """Returns the four int8 of a register, for each thread of each group of threads."""
    return np.ascontiguousarray(lanes.read(name, "u32")).view(np.int8).reshape(-1, threads, 4)
