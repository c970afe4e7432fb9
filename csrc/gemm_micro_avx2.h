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
//   A ┌───┐  row r, either rows apart by `stride` and steps adjacent (row-major), or steps apart and rows adjacent (depth-major)
//     └───┘
//
// The rows are inline assembly because gcc spills the accumulators of the same code in intrinsics. Include from files that
// are compiled with -mavx2 only; everything is in an anonymous namespace, so that no such code leaks to other machines.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "types.h"

namespace byteback::avx2 {
namespace {

using Vector = __m256i;

inline Vector load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store(void* p, Vector v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

// Up to 16 bytes of a row whose end may be the end of the tensor: never reads past it.
inline __m128i load_tail(const s8* p, s64 n) {
    if (n >= 16) return load16(p);
    alignas(16) s8 bytes[16] = {};
    std::memcpy(bytes, p, static_cast<size_t>(n));
    return _mm_load_si128(reinterpret_cast<const __m128i*>(bytes));
}

#define BYTEBACK_ROW_S16(i, p)                                                                            \
    asm("vbroadcastss %[m], %[a]\n\tvpmaddwd %[b0], %[a], %[t]\n\tvpaddd %[t], %[c0], %[c0]\n\t"          \
        "vpmaddwd %[b1], %[a], %[a]\n\tvpaddd %[a], %[c1], %[c1]"                                         \
        : [c0] "+x"(c[i][0]), [c1] "+x"(c[i][1]), [a] "=&x"(ta), [t] "=&x"(tb)                            \
        : [b0] "x"(b0), [b1] "x"(b1), [m] "m"(*reinterpret_cast<const s32*>(p)))

#define BYTEBACK_ROW_U8(i, p)                                                                             \
    asm("vbroadcastss %[m], %[a]\n\tvpmaddubsw %[b0], %[a], %[t]\n\tvpmaddubsw %[b1], %[a], %[a]\n\t"     \
        "vpmaddwd %[o], %[t], %[t]\n\tvpmaddwd %[o], %[a], %[a]\n\t"                                      \
        "vpaddd %[t], %[c0], %[c0]\n\tvpaddd %[a], %[c1], %[c1]"                                          \
        : [c0] "+x"(c[i][0]), [c1] "+x"(c[i][1]), [a] "=&x"(ta), [t] "=&x"(tb)                            \
        : [b0] "x"(b0), [b1] "x"(b1), [o] "x"(ones), [m] "m"(*reinterpret_cast<const s32*>(p)))

template <int rows>
inline void write_block(Vector (&c)[rows][2], s32* C, s64 ldc, bool accumulate) {
    for (int i = 0; i < rows; ++i) {
        s32* row = C + i * ldc;
        if (accumulate) {
            c[i][0] = _mm256_add_epi32(c[i][0], load(row));
            c[i][1] = _mm256_add_epi32(c[i][1], load(row + 8));
        }
        store(row, c[i][0]);
        store(row + 8, c[i][1]);
    }
}

struct SignedPairs {
    static constexpr int kUnit = 2, kRows = 6, kBytes = 2;  // depth per step, rows of the block, bytes per packed value

    // C[6][16] (+)= A · B over `steps` steps. depth_major: row i at A + 4*i and a step is `stride` bytes further.
    template <bool depth_major>
    __attribute__((noinline)) static void multiply(const char* A, s64 stride, const char* B, s32* C, s64 ldc, s64 steps,
                                                   bool accumulate) {
        Vector c[6][2], ta, tb;
        for (auto& row : c) row[0] = row[1] = _mm256_setzero_si256();
        if constexpr (depth_major) {
            for (s64 k = 0; k < steps; ++k, A += stride, B += 64) {
                const Vector b0 = load(B), b1 = load(B + 32);
                BYTEBACK_ROW_S16(0, A);
                BYTEBACK_ROW_S16(1, A + 4);
                BYTEBACK_ROW_S16(2, A + 8);
                BYTEBACK_ROW_S16(3, A + 12);
                BYTEBACK_ROW_S16(4, A + 16);
                BYTEBACK_ROW_S16(5, A + 20);
            }
        } else {
            const char *A1 = A + stride, *A2 = A1 + stride, *A3 = A2 + stride, *A4 = A3 + stride, *A5 = A4 + stride;
            for (s64 o = 0; o < 4 * steps; o += 4, B += 64) {
                const Vector b0 = load(B), b1 = load(B + 32);
                BYTEBACK_ROW_S16(0, A + o);
                BYTEBACK_ROW_S16(1, A1 + o);
                BYTEBACK_ROW_S16(2, A2 + o);
                BYTEBACK_ROW_S16(3, A3 + o);
                BYTEBACK_ROW_S16(4, A4 + o);
                BYTEBACK_ROW_S16(5, A5 + o);
            }
        }
        write_block(c, C, ldc, accumulate);
    }

    // n int8 values of one row, widened. May write up to 15 values past the end.
    static void pack_row(char* to, const s8* from, s64 n) {
        s64 c = 0;
        for (; c + 16 <= n; c += 16) store(to + 2 * c, _mm256_cvtepi8_epi16(load16(from + c)));
        if (c < n) store(to + 2 * c, _mm256_cvtepi8_epi16(load_tail(from + c, n - c)));
    }

    // n values of kUnit rows, interleaved: [value][row]. May write up to 15 values past the end.
    static void interleave(char* to, const s8* const* from, s64 n) {
        for (s64 c = 0; c < n; c += 16) {
            const __m128i x = load_tail(from[0] + c, n - c), y = load_tail(from[1] + c, n - c);
            store(to + 4 * c, _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(x, y)));
            store(to + 4 * c + 32, _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(x, y)));
        }
    }
};

struct UnsignedQuads {
    static constexpr int kUnit = 4, kRows = 5, kBytes = 1;

    template <bool depth_major>
    __attribute__((noinline)) static void multiply(const char* A, s64 stride, const char* B, s32* C, s64 ldc, s64 steps,
                                                   bool accumulate) {
        Vector c[5][2], ta, tb;
        const Vector ones = _mm256_set1_epi16(1);
        for (auto& row : c) row[0] = row[1] = _mm256_setzero_si256();
        if constexpr (depth_major) {
            for (s64 k = 0; k < steps; ++k, A += stride, B += 64) {
                const Vector b0 = load(B), b1 = load(B + 32);
                BYTEBACK_ROW_U8(0, A);
                BYTEBACK_ROW_U8(1, A + 4);
                BYTEBACK_ROW_U8(2, A + 8);
                BYTEBACK_ROW_U8(3, A + 12);
                BYTEBACK_ROW_U8(4, A + 16);
            }
        } else {
            const char *A1 = A + stride, *A2 = A1 + stride, *A3 = A2 + stride, *A4 = A3 + stride;
            for (s64 o = 0; o < 4 * steps; o += 4, B += 64) {
                const Vector b0 = load(B), b1 = load(B + 32);
                BYTEBACK_ROW_U8(0, A + o);
                BYTEBACK_ROW_U8(1, A1 + o);
                BYTEBACK_ROW_U8(2, A2 + o);
                BYTEBACK_ROW_U8(3, A3 + o);
                BYTEBACK_ROW_U8(4, A4 + o);
            }
        }
        write_block(c, C, ldc, accumulate);
    }

    static void pack_row(char* to, const s8* from, s64 n) { std::memcpy(to, from, static_cast<size_t>(n)); }

    static void interleave(char* to, const s8* const* from, s64 n) {
        for (s64 c = 0; c < n; c += 16) {
            __m128i x[4];
            for (int u = 0; u < 4; ++u) x[u] = load_tail(from[u] + c, n - c);
            const __m128i a = _mm_unpacklo_epi8(x[0], x[1]), b = _mm_unpacklo_epi8(x[2], x[3]);
            const __m128i d = _mm_unpackhi_epi8(x[0], x[1]), e = _mm_unpackhi_epi8(x[2], x[3]);
            __m128i* out = reinterpret_cast<__m128i*>(to + 4 * c);
            _mm_storeu_si128(out, _mm_unpacklo_epi16(a, b));
            _mm_storeu_si128(out + 1, _mm_unpackhi_epi16(a, b));
            _mm_storeu_si128(out + 2, _mm_unpacklo_epi16(d, e));
            _mm_storeu_si128(out + 3, _mm_unpackhi_epi16(d, e));
        }
    }
};

#undef BYTEBACK_ROW_S16
#undef BYTEBACK_ROW_U8

}  // namespace
}  // namespace byteback::avx2
