# SPDX-License-Identifier: Apache-2.0
"""The state of all threads of a launch, and control flow. The threads with the lowest position in the program run next."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import numpy as np

from gpu_check.ptx.memory import Array, Fault, Global, Shared
from gpu_check.ptx.program import Instruction, Program, register_kind

_CODES = {"s": "i", "u": "u", "b": "u"}  # numpy's letters; the bits of `b` are read as an unsigned number
TYPES = {f"{kind}{8 * size}": np.dtype(f"{code}{size}") for kind, code in _CODES.items() for size in (1, 2, 4, 8)}
TYPES["f32"] = np.dtype("f4")

Run = Callable[["Lanes", Instruction], None]
_INSTRUCTIONS: list[tuple[re.Pattern[str], Run]] = []


def opcode(pattern: str) -> Callable[[Run], Run]:
    """Registers what runs the opcodes that a regular expression matches."""

    def add(run: Run) -> Run:
        _INSTRUCTIONS.append((re.compile(pattern), run))
        return run

    return add


def unsigned(bits: int) -> np.dtype:
    return TYPES[f"u{bits}"]


class Copy:
    """An asynchronous copy under way: its threads, their group, where to, and the bytes."""

    def __init__(self, lanes: Array, group: Array, to: Array, data: Array) -> None:
        self.lanes, self.group, self.to, self.data = lanes, group, to, data


class Lanes:
    def __init__(
        self, program: Program, grid: tuple[int, ...], threads: int, arguments: list[int], memory: Global, shared: int
    ) -> None:
        self.program, self.memory = program, memory
        blocks = np.array([at[::-1] for at in product(*(range(size) for size in grid[::-1]))], np.uint32)
        self.block = np.repeat(np.arange(len(blocks)), threads)
        self.count = len(self.block)
        self.shared = Shared(len(blocks), shared)
        self.parameters = dict(zip((name for _, name in program.parameters), arguments, strict=True))
        self.registers: dict[str, Array] = {"%tid.x": np.tile(np.arange(threads, dtype=np.uint32), len(blocks))}
        for axis, letter in enumerate("xyz"):
            self.registers[f"%ctaid.{letter}"] = blocks[self.block, axis]
        self.active = np.ones(self.count, bool)
        self.copies: list[Copy] = []
        self.group = np.zeros(self.count, np.int64)  # how many groups of copies each thread has closed
        self._constants: dict[tuple[str, str], Array] = {}
        self._runs = [self._find(made) for made in program.code]

    @staticmethod
    def _find(made: Instruction) -> Run | None:
        if made.is_control():
            return None
        for pattern, run in _INSTRUCTIONS:
            if pattern.fullmatch(made.opcode):
                return run
        raise NotImplementedError(f"PTX instruction {made.text!r}: no rule for its opcode")

    def run(self) -> None:
        position, alive = np.zeros(self.count, np.int64), np.ones(self.count, bool)
        with np.errstate(all="ignore"):
            while alive.any():
                at = int(position[alive].min())
                here = alive & (position == at)
                end = self.program.ends[at]
                for index in range(at, end):
                    self._execute(index, here)
                position[here] = end
                made = self.program.code[end] if end < len(self.program.code) else None
                if made is not None and made.is_control():
                    self._branch(made, here, position, alive)

    def _execute(self, index: int, here: Array) -> None:
        made, run = self.program.code[index], self._runs[index]
        self.active = self._guarded(made, here)
        if self.active.any() and run is not None:
            try:
                run(self, made)
            except Fault as fault:
                raise Fault(f"{fault}: {made.text}") from None

    def _guarded(self, made: Instruction, here: Array) -> Array:
        if not made.guard:
            return here
        on = self.read(made.guard, "pred")
        return here & (~on if made.negated else on)

    def _branch(self, made: Instruction, here: Array, position: Array, alive: Array) -> None:
        goes = self._guarded(made, here)
        position[here] += 1
        if made.opcode.startswith("bra"):
            position[goes] = self.program.labels[made.name(0)]
        else:
            alive &= ~goes

    def read(self, name: str, kind: str) -> Array:
        """Returns an operand of all threads. A register of another size is cut, or filled up with zeros."""
        if not name.startswith("%"):
            if (name, kind) not in self._constants:
                self._constants[name, kind] = np.full(self.count, _constant(name, kind))
            return self._constants[name, kind]
        if name not in self.registers:
            known = register_kind(name)
            self.registers[name] = np.zeros(self.count, bool if known == "pred" else unsigned(int(known[1:])))
        found = self.registers[name]
        if kind == "pred":
            assert found.dtype == bool, name
            return found
        dtype = TYPES[kind]
        return found.astype(unsigned(8 * dtype.itemsize), copy=False).view(dtype)

    def write(self, name: str, value: Array) -> None:
        """Writes a register of the active threads. A narrower value is extended by its sign."""
        if name == "_":
            return
        kind = register_kind(name)
        if kind != "pred":
            dtype = unsigned(int(kind[1:]))
            if value.dtype.itemsize != dtype.itemsize:
                value = value.astype(dtype)
            value = np.ascontiguousarray(value).view(dtype)
        if self.active.all():
            self.registers[name] = np.array(value)
        else:
            self.registers[name] = np.where(self.active, value, self.read(name, kind))

    def address(self, text: str) -> Array:
        """Returns the addresses of an operand such as [%rd1 + 16]."""
        base, _, offset = (part.strip() for part in text[1:-1].partition("+"))
        kind = register_kind(base) if base.startswith("%") else "b64"
        return self.read(base, kind).astype(np.int64) + int(offset or "0", 0)

    def lanes(self) -> Array:
        return np.nonzero(self.active)[0]

    def warps(self) -> Array:
        """Returns which warps are active. An instruction of a warp needs all of its threads."""
        active = self.active.reshape(-1, 32)
        if (active.any(1) != active.all(1)).any():
            raise Fault("an instruction of a warp runs on a part of its threads")
        return active[:, 0]


def _constant(text: str, kind: str) -> Array:
    if kind == "pred":
        return np.array(int(text, 0) != 0)
    dtype = TYPES[kind]
    if text == "global_smem":
        return np.zeros((), dtype)
    if text.startswith("0f"):
        return np.array(int(text[2:], 16), np.uint32).view(dtype)
    number = int(text.removesuffix("U"), 0) & ((1 << 8 * dtype.itemsize) - 1)
    return np.array(number, unsigned(8 * dtype.itemsize)).view(dtype)
