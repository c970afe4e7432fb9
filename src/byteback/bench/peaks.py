# SPDX-License-Identifier: Apache-2.0
"""What share of the machine's peak a kernel reaches: of the instruction that it multiplies with, and of what it multiplies.

A product of a layer is a number of multiplications, as a textbook counts them. Winograd F(4x4,3x3) makes a quarter of them:
36 for 4x4 outputs instead of 144. Its share is that of the multiplications it makes, so that no share can exceed 100%; the
GMAC/s of `byteback bench kernels` stay the textbook's.
"""

from __future__ import annotations

from collections.abc import Mapping

# kernel -> (instruction, multiplications it makes per multiplication of the textbook); others have no vector instruction
_INSTRUCTIONS = {
    "avx2/gemm_u8": ("vpmaddubsw", 1.0),
    "avx2/gemm_s16": ("vpmaddwd", 1.0),
    "avx2/winograd": ("vpmaddwd", 0.25),
    "avx2/depthwise": ("vpmaddwd", 1.0),
    "avx512vnni/gemm_s8": ("vpdpbusd", 1.0),
    "avx512vnni/direct": ("vpdpbusd", 1.0),
    "avx512vnni/winograd": ("vpdpwssd", 0.25),
    "avx512vnni/depthwise": ("vpdpwssd", 1.0),
}


def best(peaks: Mapping[str, float], instruction: str) -> float | None:
    """Returns the peak of an instruction with registers of the better width; None if it was not measured.

    >>> best({"vpdpbusd ymm": 230.0, "vpdpbusd zmm": 460.0, "vpdpwssd zmm": 230.0}, "vpdpbusd")
    460.0
    """
    return max((gmacs for name, gmacs in peaks.items() if name.split()[0] == instruction), default=None)


def share(peaks: Mapping[str, float], kernel: str, gmacs: float) -> float | None:
    """Returns the share of the peak that a kernel reaches with `gmacs` as the textbook counts; None if that is not known.

    >>> share({"vpdpwssd zmm": 200.0}, "avx512vnni/winograd", 400.0)
    0.5
    """
    if kernel not in _INSTRUCTIONS:
        return None
    instruction, work = _INSTRUCTIONS[kernel]
    peak = best(peaks, instruction)
    return None if peak is None else gmacs * work / peak


def describe(peaks: Mapping[str, float]) -> str:
    """Returns the peaks as one line, by instruction.

    >>> describe({"vpdpbusd ymm": 230.0, "vpdpbusd zmm": 231.0, "vfmadd231ps zmm": 58.0})
    'vpdpbusd ymm 230, vpdpbusd zmm 231, vfmadd231ps zmm 58'
    """
    return ", ".join(f"{name} {gmacs:.0f}" for name, gmacs in peaks.items()) or "unknown"
