# SPDX-License-Identifier: Apache-2.0
"""Instructions that each thread runs by itself."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from gpu_check.ptx.lanes import TYPES, Lanes, opcode, unsigned
from gpu_check.ptx.memory import Array
from gpu_check.ptx.program import Instruction

_INTEGER = r"[sub](16|32|64)"


def _operands(lanes: Lanes, made: Instruction, count: int) -> tuple[Array, ...]:
    return tuple(lanes.read(made.name(index), made.kind) for index in range(1, count + 1))


@opcode(r"mov\.(pred|[sub](16|32|64)|f32)")
def mov(lanes: Lanes, made: Instruction) -> None:
    source, target = made.names(1), made.names(0)
    if len(source) > 1:
        width = int(made.kind[1:]) // len(source)
        parts = np.stack([lanes.read(name, f"u{width}") for name in source], 1)
        lanes.write(target[0], parts.view(TYPES[made.kind])[:, 0])
    elif len(target) > 1:
        width = int(made.kind[1:]) // len(target)
        parts = np.ascontiguousarray(lanes.read(source[0], made.kind)).view(unsigned(width)).reshape(lanes.count, -1)
        for name, part in zip(target, parts.T, strict=True):
            lanes.write(name, part)
    else:
        lanes.write(target[0], lanes.read(source[0], made.kind))


@opcode(r"ld\.param\.[ub](32|64)")
def ld_param(lanes: Lanes, made: Instruction) -> None:
    value = lanes.parameters[made.name(1)[1:-1]] & ((1 << int(made.kind[1:])) - 1)
    lanes.write(made.name(0), np.full(lanes.count, value, unsigned(int(made.kind[1:]))))


@opcode(r"cvta\.to\.global\.u64")
def cvta(lanes: Lanes, made: Instruction) -> None:
    lanes.write(made.name(0), lanes.read(made.name(1), "u64"))


_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "min": np.minimum,
    "max": np.maximum,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


@opcode(rf"(add|sub|mul)\.rn\.f32|(add|sub|mul\.lo|min|max)\.{_INTEGER}|(and|or|xor)\.(pred|{_INTEGER})")
def binary(lanes: Lanes, made: Instruction) -> None:
    lanes.write(made.name(0), _BINARY[made.opcode.split(".")[0]](*_operands(lanes, made, 2)))


@opcode(r"(add|sub|mul)\.rn\.f32x2")
def binary_pair(lanes: Lanes, made: Instruction) -> None:
    """Two float32 in a register of 64 bits."""
    x, y = (np.ascontiguousarray(lanes.read(made.name(index), "u64")).view(np.float32) for index in (1, 2))
    lanes.write(made.name(0), _BINARY[made.opcode.split(".")[0]](x, y).view(np.uint64))


@opcode(rf"(not|neg|abs)\.({_INTEGER}|pred)|(neg|abs)\.f32")
def unary(lanes: Lanes, made: Instruction) -> None:
    run = {"not": operator.invert, "neg": operator.neg, "abs": np.abs}[made.opcode.split(".")[0]]
    lanes.write(made.name(0), run(*_operands(lanes, made, 1)))


def _wide(kind: str) -> np.dtype:
    return TYPES[f"{kind[0]}{2 * int(kind[1:])}"]


@opcode(r"(mul|mad)\.wide\.[su](16|32)|mul\.hi\.[su](16|32)")
def multiply_wide(lanes: Lanes, made: Instruction) -> None:
    x, y = (part.astype(_wide(made.kind)) for part in _operands(lanes, made, 2))
    found = x * y
    if made.has("hi"):
        found = (found >> int(made.kind[1:])).astype(TYPES[made.kind])
    if made.has("mad"):
        found = found + lanes.read(made.name(3), f"{made.kind[0]}{2 * int(made.kind[1:])}")
    lanes.write(made.name(0), found)


@opcode(r"mad\.lo\.[su](16|32|64)")
def multiply_add(lanes: Lanes, made: Instruction) -> None:
    x, y, z = _operands(lanes, made, 3)
    lanes.write(made.name(0), x * y + z)


@opcode(r"(div|rem)\.[su](16|32|64)")
def divide(lanes: Lanes, made: Instruction) -> None:
    """Towards zero. What a division by zero gives is not defined by PTX; here it is 0, and the remainder x."""
    x, y = _operands(lanes, made, 2)
    quotient = x // np.where(y == 0, 1, y).astype(x.dtype)
    exact = quotient * y == x
    quotient = np.where(y == 0, 0, quotient + (((x < 0) != (y < 0)) & ~exact)).astype(x.dtype)
    lanes.write(made.name(0), quotient if made.has("div") else (x - quotient * y))


@opcode(r"div\.rn\.f32")
def divide_float(lanes: Lanes, made: Instruction) -> None:
    x, y = _operands(lanes, made, 2)
    lanes.write(made.name(0), x / y)


@opcode(r"(shl\.b|shr\.[sub])(16|32|64)")
def shift(lanes: Lanes, made: Instruction) -> None:
    bits = int(made.kind[1:])
    x, by = lanes.read(made.name(1), made.kind), lanes.read(made.name(2), "u32")
    inside = np.minimum(by, bits - 1).astype(x.dtype)
    found = x << inside if made.has("shl") else x >> inside
    fill = -1 if made.kind[0] == "s" else 0  # a negative number shifted far is -1
    lanes.write(made.name(0), np.where(by < bits, found, np.where(x < 0, fill, 0)).astype(x.dtype))


@opcode(r"bfe\.[su]32")
def bit_field(lanes: Lanes, made: Instruction) -> None:
    x = lanes.read(made.name(1), made.kind).astype(np.int64)
    start, length = (lanes.read(made.name(index), "u32").astype(np.int64) & 255 for index in (2, 3))
    found = (x >> np.minimum(start, 32)) & ((np.int64(1) << np.minimum(length, 32)) - 1)
    if made.kind == "s32":
        sign = np.int64(1) << (np.clip(length, 1, 32) - 1)
        found = (found ^ sign) - sign
    lanes.write(made.name(0), found.astype(TYPES[made.kind]))


@opcode(r"prmt\.b32")
def permute_bytes(lanes: Lanes, made: Instruction) -> None:
    """Each digit of the third operand chooses one of eight bytes; its top bit copies the byte's sign instead."""
    both = np.stack([lanes.read(made.name(index), "u32") for index in (1, 2)], 1).view(np.uint8)
    chosen = (lanes.read(made.name(3), "u32")[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 15
    found = np.take_along_axis(both, (chosen & 7).astype(np.int64), 1)
    found = np.where(chosen & 8, (found >> 7) * np.uint8(255), found)
    lanes.write(made.name(0), np.ascontiguousarray(found).view(np.uint32)[:, 0])


_COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


@opcode(r"setp\.(eq|ne|lt|le|gt|ge)\.[sub](16|32|64)|setp\.(eq|ne|lt|le|gt|ge)u?\.f32|setp\.(num|nan)\.f32")
def compare(lanes: Lanes, made: Instruction) -> None:
    """Floats: with `u` at the end NaN gives true, else false."""
    x, y = _operands(lanes, made, 2)
    name = made.opcode.split(".")[1]
    nan = np.isnan(x) | np.isnan(y) if made.kind == "f32" else np.zeros(lanes.count, bool)
    if name in ("num", "nan"):
        lanes.write(made.name(0), nan if name == "nan" else ~nan)
    else:
        found = _COMPARE[name[:2]](x, y)
        lanes.write(made.name(0), found | nan if name.endswith("u") else found & ~nan)


@opcode(rf"selp\.({_INTEGER}|f32)")
def select(lanes: Lanes, made: Instruction) -> None:
    x, y = _operands(lanes, made, 2)
    lanes.write(made.name(0), np.where(lanes.read(made.name(3), "pred"), x, y))


@opcode(r"cvt\.[su](8|16|32|64)\.[su](8|16|32|64)|cvt\.rn\.f32\.[su](8|16|32|64)")
def convert(lanes: Lanes, made: Instruction) -> None:
    to, source = made.opcode.split(".")[-2:]
    lanes.write(made.name(0), lanes.read(made.name(1), source).astype(TYPES[to]))


@opcode(r"cvt\.rzi\.[su](8|16|32)\.f32")
def truncate(lanes: Lanes, made: Instruction) -> None:
    """PTX clamps to the range of the integer; NaN gives 0."""
    limits = np.iinfo(TYPES[made.opcode.split(".")[-2]])
    x = np.trunc(lanes.read(made.name(1), "f32").astype(np.float64))
    found = np.where(np.isnan(x), 0, np.clip(x, limits.min, limits.max))
    lanes.write(made.name(0), found.astype(np.int64).astype(limits.dtype))


@opcode(r"cvt\.rmi(\.ftz)?\.f32\.f32")
def floor(lanes: Lanes, made: Instruction) -> None:
    x = lanes.read(made.name(1), "f32")
    if made.has("ftz"):
        x = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)
    lanes.write(made.name(0), np.floor(x))


@opcode(r"bar\.(warp\.)?sync|fence\.proxy\.async\.shared::cta")
def barrier(lanes: Lanes, made: Instruction) -> None:
    """Threads run in lockstep, so there is nothing to wait for."""
