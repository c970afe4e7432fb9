// SPDX-License-Identifier: Apache-2.0
// The two multiply kernels of the AVX2 path: a block of C += A · B in registers, exact in int32.
//
//                 depth per step   block     exact for
//   SignedPairs   2 x int16        6 x 16    any int8 x int8 (vpmaddwd: both widened to int16 when packed)
//   UnsignedQuads 4 x int8         5 x 16    A in 0..127, B in ±127 (vpmaddubsw: 2·127² = 32258 fits an int16)
//
// One step is 4 bytes of A, broadcast to a whole register, times 64 bytes of B (16 columns of 4 bytes):
//
//        B  [step][16 columns][4 bytes]     b0 = columns 0..7, b1 = columns 8..15
//   A  [row][step][4 bytes] or [step][row][4 bytes]
//
// The rows are inline assembly because gcc spills the accumulators of the same code in intrinsics. Include from files that
// are compiled with -mavx2 or more; everything is in an anonymous namespace, so that no such code leaks to other machines.
//
// gemm_block.h says what else a multiply kernel has.
#pragma once

#include <algorithm>
#include <cstring>

#include "conv/gemm/gemm_block.h"
#include "conv/gemm/x86/gemm_columns_avx2.h"

namespace byteback {
namespace {

using Vector = __m256i;

inline __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

// Up to 16 bytes of a row whose end may be the end of the tensor: never reads past it.
inline __m128i load_tail(const s8* p, s64 n) {
    if (n >= 16) return load16(p);
    alignas(16) s8 bytes[16] = {};
    std::memcpy(bytes, p, static_cast<size_t>(n));
    return _mm_load_si128(reinterpret_cast<const __m128i*>(bytes));
}

using Alias32 = s32 __attribute__((may_alias));

// C[rows][16] (+)= A · B over at least one step. Row i of A begins at A + i * row bytes and its next step is `step` bytes on,
// so that rows may lie one after the other or interleaved.
template <class Micro>
__attribute__((noinline)) void multiply_block(const char* A, s64 row, s64 step, const char* B, s64 steps, s32* C, s64 ldc,
                                              bool accumulate) {
    // Named sums: of an array gcc keeps a copy in memory, and stores it in every step.
    const Vector zero = _mm256_setzero_si256(), ones = _mm256_set1_epi16(1);
    Vector low0 = zero, low1 = zero, low2 = zero, low3 = zero, low4 = zero, low5 = zero;
    Vector high0 = zero, high1 = zero, high2 = zero, high3 = zero, high4 = zero, high5 = zero;
    const char* A3 = A + 3 * row;
    do {
        const Vector b_low = load(B), b_high = load(B + 32);
        Micro::row(low0, high0, b_low, b_high, ones, A);
        Micro::row(low1, high1, b_low, b_high, ones, A + row);
        Micro::row(low2, high2, b_low, b_high, ones, A + 2 * row);
        Micro::row(low3, high3, b_low, b_high, ones, A3);
        Micro::row(low4, high4, b_low, b_high, ones, A3 + row);
        if constexpr (Micro::kRows > 5) Micro::row(low5, high5, b_low, b_high, ones, A3 + 2 * row);
        A += step;
        A3 += step;
        B += 64;
    } while (--steps);
    const auto write = [=](int i, Vector low, Vector high) {
        s32* to = C + i * ldc;
        store(to, accumulate ? _mm256_add_epi32(low, load(to)) : low);
        store(to + 8, accumulate ? _mm256_add_epi32(high, load(to + 8)) : high);
    };
    write(0, low0, high0);
    write(1, low1, high1);
    write(2, low2, high2);
    write(3, low3, high3);
    write(4, low4, high4);
    if constexpr (Micro::kRows > 5) write(5, low5, high5);
}

template <class Micro>
inline void multiply_to_sums(const GemmBlock& b, const SumsTo& out) {
    for (s64 i = 0; i < b.stretches; ++i)
        multiply_block<Micro>(b.depth[i].A, b.row, b.step, b.depth[i].B, b.depth[i].steps, out.to, out.stride,
                              out.add || i > 0);
}

template <class Micro>
inline void multiply_to_floats(const GemmBlock& b, const FloatsTo& out) {
    alignas(64) s32 sums[Micro::kRows * kColumns];
    multiply_to_sums<Micro>(b, {sums, kColumns, 0, false});
    write_floats(sums, b.rows, out);
}

struct SignedPairs {
    static constexpr int kUnit = 2, kRows = 6, kPanels = 1, kBytes = 2;
    static constexpr bool kExact = false;
    static constexpr s32 kOffset = 0;
    static constexpr s64 kDepth = 640, kTileRows = 48, kTileStep = kRows;
    static constexpr s64 kNearBytes = 400'000, kSumsBytes = 400'000, kPackedBytes = 6 << 20;

    // Both multiplies before both additions is a few percent faster than alternating.
    __attribute__((always_inline)) static void row(Vector& low, Vector& high, Vector b_low, Vector b_high, Vector,
                                                   const char* a) {
        Vector pair, product;
        asm volatile(
            "vbroadcastss %[a], %[pair]\n\t"
            "vpmaddwd %[b_low], %[pair], %[product]\n\t"
            "vpmaddwd %[b_high], %[pair], %[pair]\n\t"
            "vpaddd %[product], %[low], %[low]\n\t"
            "vpaddd %[pair], %[high], %[high]"
            : [low] "+x"(low), [high] "+x"(high), [pair] "=&x"(pair), [product] "=&x"(product)
            : [b_low] "x"(b_low), [b_high] "x"(b_high), [a] "m"(*reinterpret_cast<const Alias32*>(a)));
    }

    // n int8 values of one row, widened. May write up to 15 values past the end.
    static void pack_row_a(char* to, const s8* from, s64 n) {
        s64 c = 0;
        for (; c + 16 <= n; c += 16) store(to + 2 * c, _mm256_cvtepi8_epi16(load16(from + c)));
        if (c < n) store(to + 2 * c, _mm256_cvtepi8_epi16(load_tail(from + c, n - c)));
    }

    static void interleave_a(char* to, const s8* const* from, s64 n, s64 readable, s64 sixteen = 64) {
        for (s64 c = 0; c < n; c += 16, to += sixteen) {
            const __m128i x = load_tail(from[0] + c, readable - c), y = load_tail(from[1] + c, readable - c);
            store(to, _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(x, y)));
            store(to + 32, _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(x, y)));
        }
    }

    static void pack_row_b(char* to, const s8* from, s64 n) { pack_row_a(to, from, n); }
    static void interleave_b(char* to, const s8* const* from, s64 n, s64 readable, s64 sixteen = 64) {
        interleave_a(to, from, n, readable, sixteen);
    }
    static void column_starts(const char*, s64, s32*) {}
    static void multiply_sums(const GemmBlock& block, const SumsTo& out) { multiply_to_sums<SignedPairs>(block, out); }
    static void multiply_floats(const GemmBlock& block, const FloatsTo& out) { multiply_to_floats<SignedPairs>(block, out); }
};

struct UnsignedQuads {
    static constexpr int kUnit = 4, kRows = 5, kPanels = 1, kBytes = 1;
    static constexpr bool kExact = false;
    static constexpr s32 kOffset = 0;
    static constexpr s64 kDepth = 1280, kTileRows = 80, kTileStep = kRows;
    static constexpr s64 kNearBytes = 400'000, kSumsBytes = 400'000, kPackedBytes = 6 << 20;

    __attribute__((always_inline)) static void row(Vector& low, Vector& high, Vector b_low, Vector b_high, Vector ones,
                                                   const char* a) {
        Vector quad, product;
        asm volatile(
            "vbroadcastss %[a], %[quad]\n\t"
            "vpmaddubsw %[b_low], %[quad], %[product]\n\t"
            "vpmaddubsw %[b_high], %[quad], %[quad]\n\t"
            "vpmaddwd %[ones], %[product], %[product]\n\t"
            "vpmaddwd %[ones], %[quad], %[quad]\n\t"
            "vpaddd %[product], %[low], %[low]\n\t"
            "vpaddd %[quad], %[high], %[high]"
            : [low] "+x"(low), [high] "+x"(high), [quad] "=&x"(quad), [product] "=&x"(product)
            : [b_low] "x"(b_low), [b_high] "x"(b_high), [ones] "x"(ones), [a] "m"(*reinterpret_cast<const Alias32*>(a)));
    }

    static void pack_row_a(char* to, const s8* from, s64 n) { std::memcpy(to, from, static_cast<size_t>(n)); }

    static void pack_row_b(char* to, const s8* from, s64 n) { pack_row_a(to, from, n); }

    static void interleave_a(char* to, const s8* const* from, s64 n, s64 readable, s64 sixteen = 64) {
        for (s64 c = 0; c < n; c += 16, to += sixteen) {
            __m128i x[4];
            for (int u = 0; u < 4; ++u) x[u] = load_tail(from[u] + c, readable - c);
            const __m128i a = _mm_unpacklo_epi8(x[0], x[1]), b = _mm_unpacklo_epi8(x[2], x[3]);
            const __m128i d = _mm_unpackhi_epi8(x[0], x[1]), e = _mm_unpackhi_epi8(x[2], x[3]);
            __m128i* out = reinterpret_cast<__m128i*>(to);
            _mm_storeu_si128(out, _mm_unpacklo_epi16(a, b));
            _mm_storeu_si128(out + 1, _mm_unpackhi_epi16(a, b));
            _mm_storeu_si128(out + 2, _mm_unpacklo_epi16(d, e));
            _mm_storeu_si128(out + 3, _mm_unpackhi_epi16(d, e));
        }
    }
    static void interleave_b(char* to, const s8* const* from, s64 n, s64 readable, s64 sixteen = 64) {
        interleave_a(to, from, n, readable, sixteen);
    }
    static void column_starts(const char*, s64, s32*) {}
    static void multiply_sums(const GemmBlock& block, const SumsTo& out) { multiply_to_sums<UnsignedQuads>(block, out); }
    static void multiply_floats(const GemmBlock& block, const FloatsTo& out) { multiply_to_floats<UnsignedQuads>(block, out); }
};

}  // namespace
}  // namespace byteback
