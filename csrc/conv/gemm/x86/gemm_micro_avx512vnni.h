// SPDX-License-Identifier: Apache-2.0
// The multiply kernel of the AVX-512 VNNI path: vpdpbusd multiplies 4 unsigned by 4 signed bytes and adds them to an int32, at
// four times the rate of FP32.
//
// Both operands are signed, so A is stored as a + 128, which fits an unsigned byte, and what that adds is taken off again:
//
//     Σ a·b = Σ (a + 128)·b - 128 Σ b
//
// The second term depends on the column only, so sums begin there (`column_starts`). vpdpbusd does not saturate: sums run
// modulo 2^32, so whatever lies between, the outcome is exact if Σ a·b itself fits an int32. Where the depth is multiplied in
// parts, every part begins at the starts of its own rows of B, so this holds for each part's sum.
#pragma once

#include <algorithm>
#include <cstring>

// First, because of how it includes the intrinsics.
#include "conv/gemm/x86/gemm_multiply_avx512vnni.h"

#include "conv/gemm/x86/gemm_columns_avx2.h"

namespace byteback {
namespace {

struct OffsetQuads {
    static constexpr int kUnit = 4, kRows = kMostRows, kPanels = 2, kBytes = 1;
    static constexpr bool kExact = true;
    static constexpr s32 kOffset = 128;
    static constexpr s64 kDepth = 1280, kTileRows = 80, kTileStep = 16;
    static constexpr s64 kNearBytes = 16 << 10, kSumsBytes = 700'000, kPackedBytes = 1 << 20;

    static __m512i flip() { return _mm512_set1_epi8(static_cast<char>(0x80)); }
    static __mmask64 first(s64 n) { return n >= 64 ? ~__mmask64{0} : (__mmask64{1} << n) - 1; }

    static void pack_row_a(char* to, const s8* from, s64 n) {
        for (; n >= 64; n -= 64, to += 64, from += 64)
            _mm512_storeu_si512(to, _mm512_xor_si512(_mm512_loadu_si512(from), flip()));
        if (n == 0) return;
        const __mmask64 there = first(n);
        _mm512_mask_storeu_epi8(to, there, _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, from), flip()));
    }
    static void pack_row_b(char* to, const s8* from, s64 n) { std::memcpy(to, from, static_cast<size_t>(n)); }

    static void interleave(char* to, const s8* const* from, s64 n, s64 readable, s64 sixteen, __m512i flipped) {
        for (s64 c = 0; c < n; c += 64, to += 4 * sixteen) {
            const __mmask64 there = first(readable - c);
            __m512i x[4];
            for (int u = 0; u < 4; ++u) x[u] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, from[u] + c), flipped);
            const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpacklo_epi8(x[2], x[3]);
            const __m512i d = _mm512_unpackhi_epi8(x[0], x[1]), e = _mm512_unpackhi_epi8(x[2], x[3]);
            // Lane i of each has 4 values of the i-th sixteen: they are turned.
            const __m512i q[4] = {_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b), _mm512_unpacklo_epi16(d, e),
                                  _mm512_unpackhi_epi16(d, e)};
            const __m512i even[2] = {_mm512_shuffle_i32x4(q[0], q[1], 0x88), _mm512_shuffle_i32x4(q[2], q[3], 0x88)};
            const __m512i odd[2] = {_mm512_shuffle_i32x4(q[0], q[1], 0xDD), _mm512_shuffle_i32x4(q[2], q[3], 0xDD)};
            _mm512_storeu_si512(to, _mm512_shuffle_i32x4(even[0], even[1], 0x88));
            if (n - c > 16) _mm512_storeu_si512(to + sixteen, _mm512_shuffle_i32x4(odd[0], odd[1], 0x88));
            if (n - c > 32) _mm512_storeu_si512(to + 2 * sixteen, _mm512_shuffle_i32x4(even[0], even[1], 0xDD));
            if (n - c > 48) _mm512_storeu_si512(to + 3 * sixteen, _mm512_shuffle_i32x4(odd[0], odd[1], 0xDD));
        }
    }
    static void interleave_a(char* to, const s8* const* from, s64 n, s64 readable, s64 sixteen = 64) {
        interleave(to, from, n, readable, sixteen, flip());
    }
    static void interleave_b(char* to, const s8* const* from, s64 n, s64 readable, s64 sixteen = 64) {
        interleave(to, from, n, readable, sixteen, _mm512_setzero_si512());
    }

    // starts[column] = -128 Σ b
    static void column_starts(const char* B, s64 steps, s32* starts) {
        const __m512i ones = _mm512_set1_epi8(1), zero = _mm512_setzero_si512();
        __m512i even = zero, odd = zero;
        for (; steps >= 2; steps -= 2, B += 128) {
            even = _mm512_dpbusd_epi32(even, ones, _mm512_loadu_si512(B));
            odd = _mm512_dpbusd_epi32(odd, ones, _mm512_loadu_si512(B + 64));
        }
        if (steps) even = _mm512_dpbusd_epi32(even, ones, _mm512_loadu_si512(B));
        _mm512_storeu_si512(starts, _mm512_sub_epi32(zero, _mm512_slli_epi32(_mm512_add_epi32(even, odd), 7)));
    }

    static void multiply_sums(const GemmBlock& block, const SumsTo& out) { multiply_quads(block, out); }
    static void multiply_floats(const GemmBlock& block, const FloatsTo& out) { multiply_quads(block, out); }
};

}  // namespace
}  // namespace byteback
