# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead of time for GPUs that are not here, and what the code consists of."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpu_check.recorded import Launch

NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
TURING = "sm_75"  # Triton has no int8 products for it: PyTorch multiplies gathered rows (gathered.py)
AMD = ("gfx90a", "gfx942", "gfx950")

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_OPCODE = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)", re.M)
_ALIGNED = [["tt.divisibility", 16]]


class Code(NamedTuple):
    """What a kernel consists of on one target."""

    opcodes: Counter[str]  # PTX, or AMD assembly
    registers: int
    spills: int  # bytes of stack
    shared: int  # bytes of shared memory
    loop: Counter[str]  # opcodes of the longest loop

    def count(self, pattern: str) -> int:
        """Returns how many instructions match a regular expression from their start."""
        return sum(number for opcode, number in self.opcodes.items() if re.match(pattern, opcode))


def source(made: Launch) -> ASTSource:
    names, constants = made.kernel.arg_names, dict(made.constants)
    typed = dict(zip(names, made.types, strict=False))
    signature = {name: "constexpr" if name in constants else typed[name] for name in names}
    attributes = {(index,): _ALIGNED for index in made.aligned}
    return ASTSource(fn=made.kernel, signature=signature, constexprs=constants, attrs=attributes)


def compiled(made: Launch, target: str) -> Any:
    """Returns Triton's compiled kernel."""
    options = {"num_warps": made.warps, "num_stages": made.stages, "enable_fp_fusion": False}
    if target.startswith("sm_"):
        return triton.compile(source(made), target=GPUTarget("cuda", int(target[3:]), 32), options=options)
    return triton.compile(source(made), target=GPUTarget("hip", target, 64), options=options)


def inspected(made: Launch, target: str) -> Code:
    """Compiles a kernel and reads its code."""
    built = compiled(made, target)
    if target.startswith("sm_"):
        text = built.asm["ptx"]
        registers, spills = _resources(built.asm["cubin"])
    else:
        text = built.asm["amdgcn"]
        found = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text))
        registers, spills = int(found["vgpr_count"]), int(found["vgpr_spill_count"])
    return Code(Counter(_OPCODE.findall(text)), registers, spills, built.metadata.shared, Counter(_OPCODE.findall(_loop(text))))


def _resources(cubin: bytes) -> tuple[int, int]:
    """Returns the registers of a thread and the bytes of its stack, where spilled registers go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def _loop(text: str) -> str:
    """Returns the longest loop: from a label to a branch back to it."""
    lines = text.splitlines()
    labels = {match[1]: at for at, line in enumerate(lines) if (match := re.match(r"(\$?\.?\w+):", line.strip()))}
    longest = (0, 0)
    for at, line in enumerate(lines):
        branch = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)
        start = labels.get(branch[1], at) if branch else at
        if at - start > longest[1] - longest[0]:
            longest = (start, at)
    return "\n".join(lines[slice(*longest)])
