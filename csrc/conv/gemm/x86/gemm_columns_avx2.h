// SPDX-License-Identifier: Apache-2.0
// What the matrix products do with 16 columns of sums besides multiplying: adding them up, and writing them as floats. AVX2.
//
// gemm_product.h, gemm_phases.h and gemm_grad_weight.h know no instruction set: each path has its own header with these names,
// and multiply kernels (gemm_micro_*.h).
#pragma once

#include <algorithm>

#include "conv/gemm/gemm_block.h"
#include "core/x86/tiles_avx2.h"

namespace byteback {
namespace {

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline void end_streams() { _mm_sfence(); }  // behind what was written past the caches

// Sums of `count` rows and one whole panel, times their factors, into the rows of the result.
inline void write_floats(const s32* sums, s64 count, const FloatsTo& out) {
    const __m256 low = out.vary ? _mm256_loadu_ps(out.factors) : _mm256_set1_ps(*out.factors);
    const __m256 high = out.vary ? _mm256_loadu_ps(out.factors + 8) : low;
    for (s64 i = 0; i < count; ++i, sums += kColumns) {
        if (!out.rows[i]) continue;
        f32* to = out.rows[i] + out.column;
        const __m256 a = _mm256_mul_ps(_mm256_cvtepi32_ps(load(sums)), low);
        const __m256 b = _mm256_mul_ps(_mm256_cvtepi32_ps(load(sums + 8)), high);
        if (out.stream) {
            _mm256_stream_ps(to, a);
            _mm256_stream_ps(to + 8, b);
        } else {
            _mm256_storeu_ps(to, a);
            _mm256_storeu_ps(to + 8, b);
        }
    }
}

// to[step][row] = rows[row][step], 4 bytes each, for 16 rows that are readable to the next multiple of 32 bytes.
inline void turn_panel(const char* rows, s64 stride, s64 steps, char* to) {
    for (s64 step = 0; step < steps; step += 8)
        for (int half = 0; half < 2; ++half) {
            __m256 turned[8];
            load_turned8(reinterpret_cast<const f32*>(rows + 8 * half * stride + 4 * step), stride / 4, turned);
            for (s64 i = 0; i < std::min<s64>(8, steps - step); ++i)
                _mm256_storeu_ps(reinterpret_cast<f32*>(to + (step + i) * 64 + 32 * half), turned[i]);
        }
}

// A row of sums times its factors, any number of columns; all have the first factor if they do not vary.
inline void write_row(const s32* sums, s64 columns, const f32* factors, bool vary, f32* to) {
    s64 j = 0;
    for (; j + 8 <= columns; j += 8) {
        const __m256 f = vary ? _mm256_loadu_ps(factors + j) : _mm256_set1_ps(*factors);
        _mm256_storeu_ps(to + j, _mm256_mul_ps(_mm256_cvtepi32_ps(load(sums + j)), f));
    }
    for (; j < columns; ++j) to[j] = static_cast<f32>(sums[j]) * factors[vary ? j : 0];
}

// `stream` bypasses the caches where whole vectors lie on their boundaries.
inline void fill_zeros(f32* to, s64 count, bool stream) {
    if (!stream || count % 8 != 0 || reinterpret_cast<uintptr_t>(to) % 32 != 0)
        return static_cast<void>(std::fill_n(to, count, 0.0f));
    for (s64 i = 0; i < count; i += 8) _mm256_stream_ps(to + i, _mm256_setzero_ps());
}

// to = from, or to += from; `count` is a multiple of 16.
inline void take_sums(s32* to, const s32* from, s64 count, bool add) {
    for (s64 i = 0; i < count; i += 8) store(to + i, add ? _mm256_add_epi32(load(to + i), load(from + i)) : load(from + i));
}

constexpr s64 kSquare = 8;  // rows that write_square takes

// 8 rows of up to 16 columns into dw[column][row]. A column's factors begin at factors + column * step and are those of its
// rows, or only the first is read if they do not vary.
inline void write_square(const s32* sums, s64 columns, const f32* factors, s64 step, bool vary, f32* dw, s64 stride) {
    for (s64 half = 0; half < columns; half += 8) {
        __m256 turned[8];
        for (int i = 0; i < 8; ++i) turned[i] = _mm256_cvtepi32_ps(load(sums + half + i * kColumns));
        turn8(turned);
        for (s64 j = half; j < std::min<s64>(half + 8, columns); ++j) {
            const f32* f = factors + j * step;
            const __m256 scale = vary ? _mm256_loadu_ps(f) : _mm256_set1_ps(*f);
            _mm256_storeu_ps(dw + j * stride, _mm256_mul_ps(turned[j - half], scale));
        }
    }
}

}  // namespace
}  // namespace byteback
