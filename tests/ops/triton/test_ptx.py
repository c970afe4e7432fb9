# SPDX-License-Identifier: Apache-2.0
"""PTX of the GPU's kernels on the CPU (tests/gpu_check/ptx), and the parts of what runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_check.ptx import instructions  # noqa: F401 (it registers them)
from gpu_check.ptx.lanes import Lanes
from gpu_check.ptx.memory import Fault, Global, Shared
from gpu_check.ptx.program import Program

TESTS = Path(__file__).parents[2]


def gpu_check(*options: str) -> str:
    """Runs in a process of its own, as this one interprets kernels."""
    made = subprocess.run(
        [sys.executable, "-m", "gpu_check", "--ptx", *options],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def test_products_and_quantize_have_the_bits_of_the_reference() -> None:
    """`make gpu-check` does all shapes and targets."""
    assert "PTX of 5 checks" in gpu_check("--quick", "--targets", "sm_80")


@pytest.mark.slow
def test_all_targets_have_the_bits_of_the_reference_and_mutants_have_not() -> None:
    found = gpu_check()
    assert found.count("0 faults so far") == 7 and found.count(": noticed") == 9


def run(body: str, *tensors: torch.Tensor, shared: int = 256, programs: int = 1) -> Lanes:
    """Runs 32 threads. %rd0, %rd1, ... point to the tensors, and %r0 is the thread."""
    parameters = [f"p{index}" for index in range(len(tensors))]
    loads = "".join(f"ld.param.b64 %rd{index}, [{name}];\n" for index, name in enumerate(parameters))
    header = ",\n".join(f".param .u64 .ptr .global .align 1 {name}" for name in parameters)
    program = Program(f".visible .entry test(\n{header}\n)\n{{\nmov.u32 %r0, %tid.x;\n{loads}{body}ret;\n\n}}\n")
    memory = Global(list(tensors))
    lanes = Lanes(program, (programs, 1, 1), 32, [memory.address(tensor) for tensor in tensors], memory, shared)
    lanes.run()
    memory.write_back()
    return lanes


def test_an_unknown_opcode_is_an_error() -> None:
    for line in ("frobnicate.b32 %r1, %r0;\n", "add.rz.f32 %r1, %r0, %r0;\n", "div.full.f32 %r1, %r0, %r0;\n"):
        with pytest.raises(NotImplementedError, match="no rule for its opcode"):
            run(line)


COPY = "mad.wide.u32 %rd8, %r0, 4, %rd0;\nshl.b32 %r1, %r0, 2;\ncp.async.ca.shared.global [%r1], [%rd8], 4;\n"
COPY += "cp.async.commit_group;\n{wait}\nld.shared.b32 %r2, [%r1];\n"


def test_a_copy_arrives_at_its_wait() -> None:
    x = torch.arange(32, dtype=torch.int32) * 7
    assert np.array_equal(run(COPY.format(wait="cp.async.wait_group 0;"), x).read("%r2", "s32"), x.numpy())
    for wait in ("", "cp.async.wait_group 1;"):
        assert set(run(COPY.format(wait=wait), x).read("%r2", "u32")) == {0x55555555}


def test_memory_out_of_bounds_is_an_error() -> None:
    x = torch.zeros(31, dtype=torch.int32)
    with pytest.raises(Fault, match="global memory out of bounds: "):
        run("mad.wide.u32 %rd8, %r0, 4, %rd0;\nst.global.b32 [%rd8], %r0;\n", x)
    with pytest.raises(Fault, match="shared memory out of bounds"):
        run("shl.b32 %r1, %r0, 2;\nst.shared.b32 [%r1+4], %r0;\n", shared=128)
    with pytest.raises(Fault, match="not aligned"):
        run("st.shared.b32 [%r0], %r0;\n")


@pytest.mark.parametrize(("step", "size", "waves"), [(4, 4, 1), (8, 4, 2), (128, 4, 32), (0, 4, 1), (16, 16, 1), (128, 16, 8)])
def test_the_meter_counts_bank_conflicts(step: int, size: int, waves: int) -> None:
    shared, threads = Shared(1, 8192), 32 if size == 4 else 8
    shared.meter("ld", (np.arange(threads) * step)[None], size)
    assert shared.waves["ld"] == [waves, 1]


@pytest.mark.parametrize("trans", [False, True])
def test_tiles_are_stored_as_ptx_says(trans: bool) -> None:
    """Each thread holds two numbers of 16 bits of a tile of 8 x 8, and gives the address of a row of it."""
    kind = ".trans" if trans else ""
    body = "and.b32 %r1, %r0, 7;\nshl.b32 %r1, %r1, 4;\nshl.b32 %r2, %r0, 17;\nadd.s32 %r2, %r2, %r0;\nadd.s32 %r2, %r2, %r0;\n"
    body += f"add.s32 %r2, %r2, 65536;\nstmatrix.sync.aligned.m8n8.x1{kind}.shared.b16 [%r1], {{%r2}};\n"
    lanes = run(body + "shl.b32 %r1, %r0, 2;\nld.shared.b32 %r3, [%r1];\n", shared=128)
    tile = np.arange(64, dtype=np.uint16).reshape(8, 8)
    expected = np.ascontiguousarray(tile.T if trans else tile).view(np.uint32).reshape(-1)
    assert np.array_equal(lanes.read("%r3", "u32"), expected)


def test_bank_conflicts_of_a_program_are_counted() -> None:
    assert run("shl.b32 %r1, %r0, 7;\nst.shared.b32 [%r1], %r0;\n", shared=4096).shared.waves == {"st.4": [32, 1]}


def test_threads_that_part_meet_again() -> None:
    body = "setp.lt.u32 %p1, %r0, 5;\nmov.b32 %r1, 0;\nLOOP:\nadd.s32 %r1, %r1, 1;\nsetp.lt.s32 %p2, %r1, %r0;\n"
    body += "@%p2 bra LOOP;\n@!%p1 bra END;\nadd.s32 %r1, %r1, 100;\nEND:\nredux.sync.max.s32 %r2, %r1, -1;\n"
    lanes = run(body)
    thread = np.arange(32)
    assert np.array_equal(lanes.read("%r1", "s32"), np.maximum(thread, 1) + 100 * (thread < 5))
    assert set(lanes.read("%r2", "s32")) == {104}


def test_integers_follow_ptx() -> None:
    lanes = run(
        "sub.s32 %r1, %r0, 16;\ndiv.s32 %r2, %r1, 3;\nrem.s32 %r3, %r1, 3;\nshr.s32 %r4, %r1, 40;\nmul.hi.u32 %r5, %r1, 5;\n"
        "prmt.b32 %r6, %r1, %r0, 0x9834;\nbfe.s32 %r7, %r1, 1, 4;\ncvt.s64.s32 %rd1, %r1;\nmul.wide.s32 %rd2, %r1, -3;\n"
    )
    x = np.arange(32) - 16
    expected = {2: np.fix(x / 3), 3: np.fmod(x, 3), 4: np.minimum(x, 0) // 100, 5: (x % 2**32) * 5 >> 32}
    for register, values in expected.items():
        assert np.array_equal(lanes.read(f"%r{register}", "s32"), values.astype(np.int64)), register
    permuted = lanes.read("%r6", "u32").view(np.uint8).reshape(32, 4)
    sign = np.where(x < 0, 255, 0)
    assert np.array_equal(permuted, np.stack([np.arange(32), sign, sign, sign], 1))
    assert np.array_equal(lanes.read("%r7", "s32"), (x // 2 + 8) % 16 - 8)
    assert np.array_equal(lanes.read("%rd1", "s64"), x) and np.array_equal(lanes.read("%rd2", "s64"), -3 * x)
