# SPDX-License-Identifier: Apache-2.0
"""Launches of the GPU's backend on CPU tensors, by running the PTX of a target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from byteback.ops.backends.triton import launch, tiles
from gpu_check.compiled import TURING, compiled
from gpu_check.ptx import instructions  # noqa: F401 (it registers them)
from gpu_check.ptx.lanes import Lanes
from gpu_check.ptx.memory import Global
from gpu_check.ptx.program import Program
from gpu_check.recorded import specialized

Waves = dict[tuple[str, str], list[int]]
"""Wavefronts of shared memory by kernel and access: how many there were, and how many without conflicts."""


class Emulator:
    """Stands in for a GPU of a target. `mutate` changes the PTX of a kernel before it runs."""

    def __init__(self, target: str, mutate: Callable[[str, str], str] = lambda name, ptx: ptx) -> None:
        self.target, self.mutate = target, mutate
        self.waves: Waves = {}
        self.launched: Counter[str] = Counter()

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], warps: int, stages: int
    ) -> None:
        made = specialized(kernel, arguments, constants, warps, stages)
        built = compiled(made, self.target)
        program = Program(self.mutate(made.name, built.asm["ptx"]))
        fixed = dict(made.constants)
        passed = [value for name, value in zip(kernel.arg_names, arguments, strict=False) if name not in fixed]
        memory = Global([value for value in passed if isinstance(value, Tensor)])
        values = [memory.address(value) if isinstance(value, Tensor) else value for value in passed]
        values += [0] * (len(program.parameters) - len(values))  # Triton's scratch memory, which these kernels do not use
        lanes = Lanes(program, (*grid, 1, 1)[:3], 32 * warps, values, memory, built.metadata.shared)
        lanes.run()
        memory.write_back()
        self.launched[made.name] += 1
        for kind, count in lanes.shared.waves.items():
            total = self.waves.setdefault((made.name, kind), [0, 0])
            total[:] = [a + b for a, b in zip(total, count, strict=True)]


@contextmanager
def emulated(emulator: Emulator) -> Iterator[Emulator]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "on_launch", emulator)
        patch.setattr(tiles, "multiplies_int8", lambda _: emulator.target != TURING)
        yield emulator
