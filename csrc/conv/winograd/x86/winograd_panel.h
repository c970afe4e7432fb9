// SPDX-License-Identifier: Apache-2.0
// Code for 16 columns of bytes that both x86 paths of Winograd use, whatever the width of their vectors.
#pragma once

#include "conv/winograd/winograd_tile.h"
#include "core/x86/tiles_avx2.h"

namespace byteback {
namespace {

// dst[j][i] = src[i][j] for 16 x 16 bytes.
inline void transpose_bytes(const s8* src, s64 src_row, s8* dst, s64 dst_row) {
    transpose16(reinterpret_cast<const u8*>(src), src_row, reinterpret_cast<u8*>(dst), dst_row);
}

// Σ|w| of each of 16 columns over `rows` rows, which must fit 16 bits. `sums` is aligned.
inline void sum_columns(const s8* from, s64 rows, u16* sums) {
    __m256i total = _mm256_setzero_si256();
    for (s64 i = 0; i < rows; ++i) {
        const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * kPanel));
        total = _mm256_add_epi16(total, _mm256_abs_epi16(_mm256_cvtepi8_epi16(row)));
    }
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums), total);
}

inline void end_streams() { _mm_sfence(); }  // behind what was written past the caches

}  // namespace
}  // namespace byteback
