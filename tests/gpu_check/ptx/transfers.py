# SPDX-License-Identifier: Apache-2.0
"""Loads, stores, atomics, and asynchronous copies, which arrive when a thread waits for them."""

from __future__ import annotations

import numpy as np

from gpu_check.ptx.lanes import TYPES, Copy, Lanes, opcode
from gpu_check.ptx.memory import POISON, Array, Fault
from gpu_check.ptx.program import Instruction

_METERED = 8  # warps: those of the first program show the pattern


@opcode(r"ld\.(global|shared)(\.v[24])?\.[sub](8|16|32|64)")
def load(lanes: Lanes, made: Instruction) -> None:
    names, dtype = made.names(0), TYPES[made.kind]
    size = dtype.itemsize * len(names)
    data = np.zeros((lanes.count, size), np.uint8)
    data[lanes.active] = _read(lanes, made.name(1), size, made.has("shared"))
    for name, column in zip(names, data.view(dtype).T, strict=True):
        lanes.write(name, column)


def _read(lanes: Lanes, operand: str, size: int, shared: bool) -> Array:
    chosen, span = lanes.lanes(), np.arange(size)
    at = lanes.address(operand)[chosen]
    if not shared:
        return lanes.memory.data[lanes.memory.check(at, size)[:, None] + span]
    at = lanes.shared.check(at, size)
    meter(lanes, f"ld.{size}", lanes.address(operand), size)
    return lanes.shared.data[lanes.block[chosen][:, None], at[:, None] + span]


@opcode(r"st\.(global|shared)(\.v[24])?\.[sub](8|16|32|64)")
def store(lanes: Lanes, made: Instruction) -> None:
    columns = [lanes.read(name, made.kind) for name in made.names(1)]
    data = np.stack(columns, 1).view(np.uint8).reshape(lanes.count, -1)[lanes.active]
    chosen, size = lanes.lanes(), data.shape[1]
    at, span = lanes.address(made.name(0)), np.arange(size)
    if made.has("shared"):
        to = lanes.shared.check(at[chosen], size)
        meter(lanes, f"st.{size}", at, size)
        lanes.shared.data[lanes.block[chosen][:, None], to[:, None] + span] = data
    else:
        lanes.memory.data[lanes.memory.check(at[chosen], size)[:, None] + span] = data


def meter(lanes: Lanes, kind: str, address: Array, size: int) -> None:
    """16 bytes of a thread are served by quarters of a warp, 8 bytes by halves. Only warps with all threads are counted."""
    whole = np.nonzero(lanes.active.reshape(-1, 32).all(1))[0][:_METERED]
    if len(whole):
        lanes.shared.meter(kind, address.reshape(-1, 32)[whole].reshape(-1, 32 if size <= 4 else 128 // size), size)


@opcode(r"atom\.global\.gpu\.relaxed\.(add|max|min)\.[su](32|64)")
def atomic(lanes: Lanes, made: Instruction) -> None:
    """Sums and maxima of integers do not depend on the order. The old value does, so nobody may read it."""
    if lanes.program.is_read(made.name(0)):
        raise NotImplementedError(f"the old value of an atomic operation: {made.text}")
    dtype = TYPES[made.kind]
    at = lanes.memory.check(lanes.address(made.name(1))[lanes.active], dtype.itemsize) // dtype.itemsize
    memory = lanes.memory.data[: lanes.memory.data.size // 8 * 8].view(dtype)
    run = {"add": np.add, "max": np.maximum, "min": np.minimum}[made.opcode.split(".")[4]]
    run.at(memory, at, lanes.read(made.name(2), made.kind)[lanes.active])


@opcode(r"cp\.async\.c[ag]\.shared\.global")
def copy(lanes: Lanes, made: Instruction) -> None:
    """Until the wait, the target holds a pattern. The fourth operand is how many bytes are read: all or 0."""
    size, chosen = int(made.name(2), 0), lanes.lanes()
    to = lanes.shared.check(lanes.address(made.name(0))[chosen], size)
    meter(lanes, f"cp.async.{size}", lanes.address(made.name(0)), size)
    data = np.zeros((len(chosen), size), np.uint8)
    wanted = lanes.read(made.name(3), "u32")[chosen] if len(made.operands) > 3 else np.full(len(chosen), size)
    if not np.isin(wanted, (0, size)).all():
        raise Fault(f"a copy of a part of {size} bytes")
    reads = wanted > 0
    source = lanes.memory.check(lanes.address(made.name(1))[chosen][reads], size)
    data[reads] = lanes.memory.data[source[:, None] + np.arange(size)]
    lanes.shared.data[lanes.block[chosen][:, None], to[:, None] + np.arange(size)] = POISON
    lanes.copies.append(Copy(chosen, lanes.group[chosen], to, data))


@opcode(r"cp\.async\.commit_group")
def close_group(lanes: Lanes, made: Instruction) -> None:
    lanes.group[lanes.active] += 1


@opcode(r"cp\.async\.wait_group")
def wait(lanes: Lanes, made: Instruction) -> None:
    """Waits until at most so many of the latest groups of a thread are under way."""
    left, kept = int(made.name(0), 0), []
    for made_copy in lanes.copies:
        lane = made_copy.lanes
        done = lanes.active[lane] & (made_copy.group < lanes.group[lane] - left)
        if done.any():
            span = made_copy.to[done][:, None] + np.arange(made_copy.data.shape[1])
            lanes.shared.data[lanes.block[lane[done]][:, None], span] = made_copy.data[done]
        if not done.all():
            rest = ~done
            kept.append(Copy(lane[rest], made_copy.group[rest], made_copy.to[rest], made_copy.data[rest]))
    lanes.copies = kept
