# SPDX-License-Identifier: Apache-2.0
"""The start-up test of elementwise functions asks each of them: one is spoilt at a time, and must be found."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"

# The path under test is the generic one, but for a bit of what the function named on the command line writes.
DRIVER = """
#include <cstdio>
#include <cstring>
#include "block/max_pool.h"
#include "block/norm.h"
#include "block/pass_check.h"
#include "core/avx512vnni.h"
#include "core/generic.h"
namespace byteback {
static const char* spoilt = "";
static void spoil(const char* name, void* first) {
    if (!std::strcmp(name, spoilt)) *static_cast<char*>(first) ^= 1;
}
namespace avx512vnni {
Report quantize(const Rows& r, const f32* x, PerScale clip, Noise n, s8* q, int threads) {
    const Report seen = generic::quantize(r, x, clip, n, q, threads);
    spoil("quantize", q);
    return seen;
}
void channel_cosine_terms(const Rows& r, const f32* x, CandidateClips c, bool stochastic, f64* terms, int threads) {
    generic::channel_cosine_terms(r, x, c, stochastic, terms, threads);
    spoil("channel_cosine_terms", terms);
}
Report normalize(const Forward& f, const Outcome& to, int threads) {
    const Report seen = generic::normalize(f, to, threads);
    spoil("normalize", to.kept);
    return seen;
}
f32 normalize_peak(const Forward& f, int threads) {
    f32 peak = generic::normalize_peak(f, threads);
    spoil("normalize_peak", &peak);
    return peak;
}
void pack_norm(s64 rows, s64 channels, const void* x, Stored kind, const Outcome& to, int threads) {
    generic::pack_norm(rows, channels, x, kind, to, threads);
    spoil("pack_norm", to.kept);
}
void normalize_grad_sums(const Backward& f, f64* total, f64* dot, f64* squares, void* masked, int threads) {
    generic::normalize_grad_sums(f, total, dot, squares, masked, threads);
    spoil("normalize_grad_sums", squares);
}
void normalize_grad(const Backward& f, f32* dx, int threads) {
    generic::normalize_grad(f, dx, threads);
    spoil("normalize_grad", dx);
}
Report normalize_grad_quantize(const Backward& f, f32 clip, Noise n, s8* values, int threads) {
    const Report seen = generic::normalize_grad_quantize(f, clip, n, values, threads);
    spoil("normalize_grad_quantize", values);
    return seen;
}
void normalize_grad_quantize_pair(const Backward& f, f32 clip, const f32* clips, Noise n, s8* a, s8* b, Report r[2],
                                  int threads) {
    generic::normalize_grad_quantize_pair(f, clip, clips, n, a, b, r, threads);
    spoil("normalize_grad_quantize_pair", &r[1].saturated);
}
void normalize_grad_tails(const Backward& f, const f32* each, f32 all, f32* peak, s64* over, s64* over_all, int threads) {
    generic::normalize_grad_tails(f, each, all, peak, over, over_all, threads);
    spoil("normalize_grad_tails", over_all);
}
void tail_count_pair(s64 rows, s64 channels, const f32* x, const f32* each, f32 all, s64* over, s64* over_all, int threads) {
    generic::tail_count_pair(rows, channels, x, each, all, over, over_all, threads);
    spoil("tail_count_pair", over);
}
void quantize_pair(s64 rows, s64 channels, const f32* x, f32 clip, const f32* clips, Noise n, s8* a, s8* b, Report r[2],
                   int threads) {
    generic::quantize_pair(rows, channels, x, clip, clips, n, a, b, r, threads);
    spoil("quantize_pair", b);
}
void channel_stats(s64 rows, s64 channels, const void* x, Stored kind, f64* total, f64* squares, f32* low, f32* high,
                   int threads) {
    generic::channel_stats(rows, channels, x, kind, total, squares, low, high, threads);
    spoil("channel_stats", high);
}
void max_pool(const Windows& w, const f32* x, f32* y, u8* taps, int threads) {
    generic::max_pool(w, x, y, taps, threads);
    spoil("max_pool", taps);
}
}
}
int main(int, char** names) {
    for (++names; *names; ++names) {
        byteback::spoilt = *names;
        std::puts(byteback::pass_check(byteback::Path::avx512vnni).c_str());
    }
}
"""
FINDS = {
    "nothing": "",
    "quantize": "quantize",
    "channel_cosine_terms": "cosine_terms",
    "normalize": "the forward pass of a block",
    "normalize_peak": "the forward pass of a block",
    "pack_norm": "the forward pass of a block",
    "normalize_grad_sums": "the backward pass of a block",
    "normalize_grad": "the backward pass of a block",
    "normalize_grad_quantize": "the backward pass of a block",
    "normalize_grad_quantize_pair": "the backward pass of a block",
    "normalize_grad_tails": "the backward pass of a block",
    "tail_count_pair": "the statistics of a block",
    "quantize_pair": "the statistics of a block",
    "channel_stats": "the statistics of a block",
    "max_pool": "the statistics of a block",
}
SOURCES = ["block/pass_check.cpp", "block/norm_generic.cpp", "block/max_pool_generic.cpp", "elementwise/quantize_generic.cpp"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_function_that_is_spoilt_is_found(tmp_path: Path) -> None:
    (tmp_path / "driver.cpp").write_text(DRIVER)
    flags = ["-std=c++17", "-O1", "-fopenmp", "-ffp-contract=off", f"-I{CSRC}", "-DBYTEBACK_AVX2", "-DBYTEBACK_AVX512VNNI"]
    sources = [str(CSRC / source) for source in SOURCES]
    subprocess.run(["g++", *flags, "driver.cpp", *sources, "-o", "driver"], cwd=tmp_path, check=True, timeout=300)
    done = subprocess.run(["./driver", *FINDS], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60)
    expected = [f"{found} differs from the generic path" if found else "" for found in FINDS.values()]
    assert done.stdout.splitlines() == expected
