# SPDX-License-Identifier: Apache-2.0
"""What kind of machine this is: from its flags, its environment and its peaks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from byteback.inspect import machine
from byteback.ops.backends import paths
from byteback.ops.backends.cpu import library

INSTRUCTIONS = {
    "avx2": {"vpmaddubsw ymm", "vpmaddwd ymm", "vfmadd231ps ymm"},
    "avx512vnni": {"vpdpbusd ymm", "vpdpbusd zmm", "vpdpwssd zmm", "vfmadd231ps zmm"},
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A CPU with AVX-512 and bfloat16, and an environment that forbids nothing."""
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "cpu", lambda: ("a CPU", frozenset({"avx512f", "avx512_bf16"})))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    return monkeypatch


def test_bf16_needs_instructions_of_the_cpu(fake: pytest.MonkeyPatch) -> None:
    assert machine.why_no_bf16() == ""
    fake.setattr(machine, "cpu", lambda: ("a CPU", frozenset({"amx_tile", "amx_bf16"})))
    assert machine.why_no_bf16() == ""
    fake.setattr(machine, "cpu", lambda: ("a CPU", frozenset({"avx2", "avx512f", "avx512_vnni"})))
    assert machine.why_no_bf16() == "this CPU has no bfloat16 instructions (avx512_bf16 or amx_bf16)"


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
@pytest.mark.parametrize(
    ("most", "allowed"),
    [
        *((most, False) for most in ("AVX2", "avx2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")),
        *((most, True) for most in ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "DEFAULT", "all", "")),
    ],
)
def test_bf16_is_left_out_where_onednn_may_not_use_it(name: str, most: str, allowed: bool, fake: pytest.MonkeyPatch) -> None:
    fake.setenv(name, most)
    assert machine.why_no_bf16() == (
        "" if allowed else f"{name}={most.upper()} forbids PyTorch's convolutions the bfloat16 instructions"
    )


def test_bf16_is_left_out_where_pytorch_is_held_to_avx2(fake: pytest.MonkeyPatch) -> None:
    fake.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert "held to AVX2" in machine.why_no_bf16()


def test_a_system_without_a_list_of_flags_has_none(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake.undo()
    fake.setattr(machine, "_INFO", tmp_path / "absent")
    assert machine.cpu.__wrapped__()[1] == frozenset()
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2\n")
    fake.setattr(machine, "_INFO", tmp_path / "cpuinfo")
    assert machine.cpu.__wrapped__() == ("Some CPU", frozenset({"fpu", "avx2"}))


def test_width_follows_from_the_peaks() -> None:
    full = machine.width({"vpdpbusd ymm": 200.0, "vpdpbusd zmm": 390.0})
    assert full == "512-bit integer instructions run at full width, 1.95 times as fast as those of 256 bits"
    assert "are split in two, 1.01 times" in machine.width({"vpdpbusd ymm": 200.0, "vpdpbusd zmm": 202.0})
    assert machine.width({"vpmaddubsw ymm": 100.0}).startswith("no 512-bit integer instructions")


def test_bf16_may_win_where_there_is_amx() -> None:
    assert machine.bf16(frozenset({"avx2"})) == "no bfloat16 instructions, no AMX"
    assert machine.bf16(frozenset({"avx512_bf16", "amx_tile", "amx_int8"})).endswith("AMX without bfloat16")
    amx = machine.bf16(frozenset({"avx512_bf16", "amx_tile", "amx_bf16"}))
    assert amx.startswith("bfloat16 by avx512_bf16, amx_bf16. ") and "bf16 autocast may well be faster than int8" in amx


@pytest.mark.skipif(library.native is None, reason="this build has no native library")
@pytest.mark.parametrize("threads", [1, 3])
def test_every_instruction_that_can_run_here_is_measured(threads: int) -> None:
    measured = machine.peaks(threads)
    can_run = {
        path
        for path in INSTRUCTIONS
        if library.native.is_compiled(n := library.NUMBERS[path]) and library.native.cpu_supports(n)
    }
    assert set(measured) == {name for path in can_run for name in INSTRUCTIONS[path]}
    assert set(paths.available()) - {"generic", "reference"} <= can_run
    assert all(gmacs > 0 for gmacs in measured.values())


def test_without_a_native_library_there_are_no_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "native", None)
    assert machine.peaks() == {}
