# SPDX-License-Identifier: Apache-2.0
"""PTX text to instructions."""

from __future__ import annotations

import re
from typing import NamedTuple

Operand = str | tuple[str, ...]

_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,][^,]*")
_CONTROL = ("bra", "ret", "exit")
_KINDS = {"%p": "pred", "%rs": "b16", "%r": "b32", "%rd": "b64"}


class Instruction(NamedTuple):
    guard: str  # the predicate register that switches it on, or ""
    negated: bool
    opcode: str
    operands: tuple[Operand, ...]
    text: str

    @property
    def kind(self) -> str:
        return self.opcode.rpartition(".")[2]

    def has(self, part: str) -> bool:
        return part in self.opcode.split(".")

    def name(self, index: int) -> str:
        """Returns an operand that is not a vector."""
        found = self.operands[index]
        assert isinstance(found, str), self.text
        return found

    def names(self, index: int) -> tuple[str, ...]:
        """Returns the registers of a vector, or the one register."""
        found = self.operands[index]
        return (found,) if isinstance(found, str) else found

    def is_control(self) -> bool:
        return self.opcode.split(".")[0] in _CONTROL


class Program:
    """A kernel: parameters, instructions, labels, and where each basic block ends."""

    def __init__(self, ptx: str) -> None:
        ptx = re.sub(r"//[^\n]*", "", ptx)
        entry = re.search(r"\.entry\s+\w+\(([^)]*)\).*?\n\{(.*?)\n\}", ptx, re.S)
        assert entry is not None, "no kernel in the PTX"
        self.parameters = re.findall(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)", entry[1].strip())
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        for line in entry[2].splitlines():
            self._add(line.strip())
        targets = {self.labels[made.name(0)] for made in self.code if made.opcode.startswith("bra")}
        self.ends = self._ends(targets)

    def _add(self, line: str) -> None:
        if line.endswith(":"):
            self.labels[line[:-1]] = len(self.code)
        elif line and not line.startswith("."):
            found = _INSTRUCTION.fullmatch(line.removesuffix(";").strip())
            assert found is not None and line.endswith(";"), f"not an instruction: {line}"
            operands = tuple(_operand(part.strip()) for part in _OPERAND.findall(found[4]))
            self.code.append(Instruction(found[2] or "", bool(found[1]), found[3], operands, line))

    def _ends(self, targets: set[int]) -> list[int]:
        """Returns, for each instruction, the first control instruction or target of a branch after it."""
        ends = [len(self.code)] * (len(self.code) + 1)
        for at in reversed(range(len(self.code))):
            ends[at] = at if self.code[at].is_control() else at + 1 if at + 1 in targets else ends[at + 1]
        return ends

    def is_read(self, register: str) -> bool:
        """Whether an instruction reads the register (its first operand is what it writes)."""
        return any(re.search(re.escape(register) + r"\b", str(made.operands[1:])) for made in self.code)


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(part.strip() for part in text[1:-1].split(","))
    return text


def register_kind(register: str) -> str:
    """Returns the type of a register as Triton's PTX names registers.

    >>> register_kind("%rd12")
    'b64'
    """
    return _KINDS[register.rstrip("0123456789")]
