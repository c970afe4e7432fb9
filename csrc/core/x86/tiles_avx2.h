// SPDX-License-Identifier: Apache-2.0
// Tiles turned in registers: rows become columns. For the transposes, for statistics of planes, and for grad_weight.
//
// A tile is turned by interleaving: after each step neighbours in a register are twice as many elements of a column.
#pragma once

#include <immintrin.h>

#include "core/types.h"

namespace byteback {
namespace {

// The columns of 8 x 8 floats in place of their rows.
inline void turn8(__m256 (&a)[8]) {
    __m256 b[8];
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    __m256 c[8];
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
            c[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
            c[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xEE);
        }
    for (int i = 0; i < 4; ++i) {
        a[i] = _mm256_permute2f128_ps(c[i], c[i + 4], 0x20);
        a[i + 4] = _mm256_permute2f128_ps(c[i], c[i + 4], 0x31);
    }
}

inline void load_turned8(const f32* from, s64 from_stride, __m256 (&v)[8]) {
    for (int i = 0; i < 8; ++i) v[i] = _mm256_loadu_ps(from + i * from_stride);
    turn8(v);
}

// to[row][column] = from[column][row] for 8 x 8 floats.
inline void transpose8(const f32* from, s64 from_stride, f32* to, s64 to_stride) {
    __m256 v[8];
    load_turned8(from, from_stride, v);
    for (int i = 0; i < 8; ++i) _mm256_storeu_ps(to + i * to_stride, v[i]);
}

// The same for bytes.
inline void transpose8(const s8* from, s64 from_stride, s8* to, s64 to_stride) {
    __m128i a[8], b[4], c[4];
    for (int i = 0; i < 8; ++i) a[i] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i * from_stride));
    for (int i = 0; i < 4; ++i) b[i] = _mm_unpacklo_epi8(a[2 * i], a[2 * i + 1]);  // channels 2i, 2i+1 of rows 0..7
    for (int i = 0; i < 2; ++i) {
        c[2 * i] = _mm_unpacklo_epi16(b[2 * i], b[2 * i + 1]);  // channels 4i..4i+3 of rows 0..3
        c[2 * i + 1] = _mm_unpackhi_epi16(b[2 * i], b[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        const __m128i rows[2] = {_mm_unpacklo_epi32(c[i], c[i + 2]), _mm_unpackhi_epi32(c[i], c[i + 2])};
        for (int j = 0; j < 2; ++j) {
            s8* at = to + (4 * i + 2 * j) * to_stride;
            _mm_storel_epi64(reinterpret_cast<__m128i*>(at), rows[j]);
            _mm_storel_epi64(reinterpret_cast<__m128i*>(at + to_stride), _mm_unpackhi_epi64(rows[j], rows[j]));
        }
    }
}

// The same for 16 x 16 bytes: interleaving row i with row i + 8, four times over.
inline void transpose16(const u8* from, s64 from_stride, u8* to, s64 to_stride) {
    __m128i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_stride));
    for (int step = 0; step < 4; ++step) {
        for (int i = 0; i < 8; ++i) {
            b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]);
            b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
        }
        for (int i = 0; i < 16; ++i) a[i] = b[i];
    }
    for (int i = 0; i < 16; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_stride), a[i]);
}

}  // namespace
}  // namespace byteback
