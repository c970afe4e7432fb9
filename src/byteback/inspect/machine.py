# SPDX-License-Identifier: Apache-2.0
"""What kind of machine this is: its instruction sets, its measured peaks, and whether it computes in bfloat16."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from byteback.ops.backends.cpu import library

BF16_FLAGS = ("avx512_bf16", "amx_bf16")
_INFO = Path("/proc/cpuinfo")
_ONEDNN_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the second is its name of before
_FULL_WIDTH = 1.5  # zmm over ymm: 2 at full width, 1 where an instruction is split


@functools.cache
def cpu() -> tuple[str, frozenset[str]]:
    """Returns (model, instruction sets). There are none where the system does not list them as Linux does."""
    if not _INFO.exists():
        return platform.processor() or platform.machine(), frozenset()
    lines = dict(line.split(":", 1) for line in _INFO.read_text().splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    return fields.get("model name", platform.machine()), frozenset(fields.get("flags", "").split())


def why_no_bf16() -> str:
    """Why bf16 autocast cannot be fast here; empty if PyTorch can multiply bfloat16 numbers by instructions of the CPU."""
    if not any(flag in cpu()[1] for flag in BF16_FLAGS):
        return f"this CPU has no bfloat16 instructions ({' or '.join(BF16_FLAGS)})"
    for name in _ONEDNN_VARIABLES:
        most = os.environ.get(name, "").upper()
        if most not in ("", "ALL", "DEFAULT") and not any(part in most for part in ("BF16", "FP16", "AMX", "AVX10")):
            return f"{name}={most} forbids PyTorch's convolutions the bfloat16 instructions"
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in ("DEFAULT", "NO AVX", "AVX2"):
        return f"PyTorch is held to {capability}, which has no bfloat16 instructions"
    return ""


def peaks(threads: int = 1) -> dict[str, float]:
    """Measures what the instructions that kernels multiply with can do here: GMAC/s of all threads together, by name.

    They run on registers only, so nothing that also reads memory can be faster. Empty without a native library. An
    instruction takes some 20 ms. As vpmaddubsw counts the sequence that ends in a sum of int32: vpmaddubsw, vpmaddwd, vpaddd.
    """
    return {} if library.native is None else dict(library.native.peaks(threads))


def width(peaks: Mapping[str, float]) -> str:
    """Returns whether the CPU has 512-bit integer instructions and whether they run at full width, as a sentence.

    >>> width({"vpdpbusd ymm": 230.0, "vpdpbusd zmm": 231.0})
    '512-bit integer instructions are split in two, 1.00 times as fast as those of 256 bits'
    """
    if "vpdpbusd zmm" not in peaks:
        return "no 512-bit integer instructions that multiply bytes (AVX-512 VNNI), or none that this build uses"
    ratio = peaks["vpdpbusd zmm"] / peaks["vpdpbusd ymm"]
    how = "run at full width" if ratio >= _FULL_WIDTH else "are split in two"
    return f"512-bit integer instructions {how}, {ratio:.2f} times as fast as those of 256 bits"


def bf16(flags: frozenset[str]) -> str:
    """Returns whether the CPU has bfloat16 and AMX, and what that means for int8, as a sentence.

    >>> bf16(frozenset({"avx512_bf16"}))
    'bfloat16 by avx512_bf16, no AMX'
    """
    found = [flag for flag in BF16_FLAGS if flag in flags]
    text = f"bfloat16 by {', '.join(found)}" if found else "no bfloat16 instructions"
    if "amx_bf16" not in flags:
        return f"{text}, {'AMX without bfloat16' if 'amx_tile' in flags else 'no AMX'}"
    return (
        f"{text}. Our kernels do not use AMX, so bf16 autocast may well be faster than int8 here: compare them with "
        "byteback bench step"
    )
