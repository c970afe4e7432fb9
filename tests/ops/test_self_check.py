# SPDX-License-Identifier: Apache-2.0
"""The start-up test of a path meets what it is there to meet: kernels are spoilt on purpose, compiled, and put before it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from byteback.ops.backends import paths

CSRC = Path(__file__).parents[2] / "csrc"

# Matrix products by the path under test, everything else by the textbook.
DRIVER = """
#include <cstdio>
#include "core/avx512vnni.h"
#include "core/generic.h"
#include "conv/conv.h"
#include "conv/self_check.h"
namespace byteback {
const char* conv_output(Path path, const ConvShape& s, const s8* x, const s8* w, Factor f, f32* y, int threads) {
    (path == Path::generic ? generic::conv_output(s, x, w, f, y, threads) : avx512vnni::gemm_output(s, x, w, f, y, threads));
    return "gemm";
}
const char* conv_grad_input(Path path, const ConvShape& s, const s8* g, const s8* w, Factor f, f32* dx, int threads) {
    path == Path::generic ? generic::conv_grad_input(s, g, w, f, dx, threads)
                          : avx512vnni::gemm_grad_input(s, g, w, f, dx, threads);
    return "gemm";
}
const char* conv_grad_weight(Path path, const ConvShape& s, const s8* g, const s8* x, Factor f, f32* dw, int threads) {
    (path == Path::generic ? generic::conv_grad_weight : avx512vnni::gemm_grad_weight)(s, g, x, f, dw, threads);
    return "gemm";
}
}
int main() { std::puts(byteback::self_check(byteback::Path::avx512vnni).c_str()); }
"""

FLAGS = ["-std=c++17", "-O1", "-fopenmp", "-ffp-contract=off", "-Icsrc"]
VECTORS = ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"]

# A file of conv/gemm, what it says, what it is made to say, what the self-check must find.
SPOILT = {
    "as it is": ("gemm_product.h", "", "", ""),
    "all of the offset is taken off the first part": (
        "gemm_weights.h",
        "Micro::column_starts(B, part.length / Micro::kUnit, to)",
        "Micro::column_starts(B, (part.start ? 0 : length) / Micro::kUnit, to)",
        "output by gemm is wrong where the sum is 133146 deep",
    ),
    "sums are never widened": (
        "gemm_product.h",
        "const bool deep = static_cast<s64>(p.taps.size()) * p.depth > kInt32Depth;",
        "const bool deep = false;",
        "output by gemm is wrong where the sum is 133146 deep",
    ),
    "blocks of 8 columns forget their sums": (
        "x86/gemm_multiply_avx512vnni.h",
        "write(v, _mm512_zextsi256_si512(sums), to, false)",
        "write(v, _mm512_xor_si512(_mm512_zextsi256_si512(sums), _mm512_zextsi256_si512(sums)), to, false)",
        "grad_input by gemm differs from the generic path",
    ),
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.skipif("avx512vnni" not in paths.available(), reason="needs AVX-512 VNNI")
@pytest.mark.parametrize("spoilt", SPOILT)
def test_the_self_check_finds(tmp_path: Path, spoilt: str) -> None:
    shutil.copytree(CSRC, tmp_path / "csrc")
    file, before, after, finds = SPOILT[spoilt]
    folder = tmp_path / "csrc" / "conv" / "gemm"
    if before:
        text = (folder / file).read_text()
        assert text.count(before) == 1
        (folder / file).write_text(text.replace(before, after))
    # A sum that should be widened and is not must not write outside of its memory.
    text = (folder / "gemm_product.h").read_text()
    text = text.replace("if (summed + products > kInt32Depth)", "if (deep && summed + products > kInt32Depth)")
    (folder / "gemm_product.h").write_text(text)
    (tmp_path / "driver.cpp").write_text(DRIVER)
    run = {"cwd": tmp_path, "check": True, "capture_output": True, "text": True, "timeout": 300}
    kernels = "csrc/conv/gemm/x86/gemm_avx512vnni.cpp"
    subprocess.run(["g++", *FLAGS, *VECTORS, "-c", kernels, "-o", "gemm.o"], **run)  # type: ignore[call-overload]
    sources = ["driver.cpp", "csrc/conv/self_check.cpp", "csrc/conv/conv_generic.cpp", "csrc/core/pool.cpp", "gemm.o"]
    subprocess.run(["g++", *FLAGS, *sources, "-o", "driver"], **run)  # type: ignore[call-overload]
    done = subprocess.run(["./driver"], **run)  # type: ignore[call-overload]
    assert done.stdout.strip() == finds
