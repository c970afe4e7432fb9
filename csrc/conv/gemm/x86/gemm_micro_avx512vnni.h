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
// 256-bit vectors: as fast as 512 bits on Zen 4, the same packed layouts as AVX2, and they do not slow down other CPUs' clocks.
#pragma once

#include "conv/gemm/x86/gemm_micro_avx2.h"

namespace byteback {
namespace {

struct OffsetQuads {
    static constexpr int kUnit = 4, kRows = 8, kBytes = 1;
    static constexpr s32 kOffset = 128;
    static constexpr s64 kDepth = 1280, kTileRows = 80;

    static __m256i flip() { return _mm256_set1_epi8(static_cast<char>(0x80)); }

    // May write up to 31 values past the end.
    static void pack_row_a(char* to, const s8* from, s64 n) {
        s64 c = 0;
        for (; c + 32 <= n; c += 32) store(to + c, _mm256_xor_si256(load(from + c), flip()));
        for (; c < n; c += 16) {
            const __m128i x = _mm_xor_si128(load_tail(from + c, n - c), _mm256_castsi256_si128(flip()));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + c), x);
        }
    }
    static void pack_row_b(char* to, const s8* from, s64 n) { std::memcpy(to, from, static_cast<size_t>(n)); }

    static void interleave_a(char* to, const s8* const* from, s64 n, s64 readable) {
        interleave_quads(to, from, n, readable, _mm256_castsi256_si128(flip()));
    }
    static void interleave_b(char* to, const s8* const* from, s64 n, s64 readable) {
        interleave_quads(to, from, n, readable, _mm_setzero_si128());
    }

    // starts[column] = -128 Σ b
    static void column_starts(const char* B, s64 steps, s32* starts) {
        const __m256i ones = _mm256_set1_epi8(1), zero = _mm256_setzero_si256();
        __m256i low = zero, high = zero;
        for (s64 step = 0; step < steps; ++step, B += 64) {
            low = _mm256_dpbusd_epi32(low, ones, load(B));
            high = _mm256_dpbusd_epi32(high, ones, load(B + 32));
        }
        store(starts, _mm256_sub_epi32(zero, _mm256_slli_epi32(low, 7)));
        store(starts + 8, _mm256_sub_epi32(zero, _mm256_slli_epi32(high, 7)));
    }

    __attribute__((always_inline)) static void row(Vector& low, Vector& high, Vector b_low, Vector b_high, const char* a) {
        Vector quad;
        asm volatile(
            "vpbroadcastd %[a], %[quad]\n\t"
            "vpdpbusd %[b_low], %[quad], %[low]\n\t"
            "vpdpbusd %[b_high], %[quad], %[high]"
            : [low] "+v"(low), [high] "+v"(high), [quad] "=&v"(quad)
            : [b_low] "v"(b_low), [b_high] "v"(b_high), [a] "m"(*reinterpret_cast<const Alias32*>(a)));
    }
};

template <>
__attribute__((noinline)) void multiply_block<OffsetQuads>(const char* A, s64 row, s64 step, const char* B, s64 steps,
                                                           const s32* starts, s32* C, s64 ldc, bool accumulate) {
    const Vector low = load(starts), high = load(starts + 8);
    Vector low0 = low, low1 = low, low2 = low, low3 = low, low4 = low, low5 = low, low6 = low, low7 = low;
    Vector high0 = high, high1 = high, high2 = high, high3 = high, high4 = high, high5 = high, high6 = high, high7 = high;
    const char* A4 = A + 4 * row;
    const s64 row3 = 3 * row;
    do {
        const Vector b_low = load(B), b_high = load(B + 32);
        OffsetQuads::row(low0, high0, b_low, b_high, A);
        OffsetQuads::row(low1, high1, b_low, b_high, A + row);
        OffsetQuads::row(low2, high2, b_low, b_high, A + 2 * row);
        OffsetQuads::row(low3, high3, b_low, b_high, A + row3);
        OffsetQuads::row(low4, high4, b_low, b_high, A4);
        OffsetQuads::row(low5, high5, b_low, b_high, A4 + row);
        OffsetQuads::row(low6, high6, b_low, b_high, A4 + 2 * row);
        OffsetQuads::row(low7, high7, b_low, b_high, A4 + row3);
        A += step;
        A4 += step;
        B += 64;
    } while (--steps);
    const auto write = [=](int i, Vector left, Vector right) {
        s32* to = C + i * ldc;
        store(to, accumulate ? _mm256_add_epi32(left, load(to)) : left);
        store(to + 8, accumulate ? _mm256_add_epi32(right, load(to + 8)) : right);
    };
    write(0, low0, high0);
    write(1, low1, high1);
    write(2, low2, high2);
    write(3, low3, high3);
    write(4, low4, high4);
    write(5, low5, high5);
    write(6, low6, high6);
    write(7, low7, high7);
}

}  // namespace
}  // namespace byteback
