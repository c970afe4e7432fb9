// SPDX-License-Identifier: Apache-2.0
// dx = (p * gm + q * x) + r of norm.h, eight floats at a time. Only for norm_*avx2.cpp.
#pragma once

#include "block/x86/norm_rows_avx2.h"

namespace byteback::avx2 {

namespace {

// `at` is the element, `k` where its channels' constants lie, `m` the mask's byte.
template <Stored stored, Gate gate, class Lanes>
BYTEBACK_INLINE __m256 gradient_of(const Backward& from, s64 at, s64 k, s64 m, Lanes lanes) {
    const __m256 x = kept_value<stored>(from.x, at, k, lanes);
    const __m256 gm = gated<gate>(lanes.load(from.g + at), x, from, k, m);
    const __m256 from_g = _mm256_mul_ps(_mm256_loadu_ps(from.p + k), gm);
    const __m256 from_x = _mm256_mul_ps(_mm256_loadu_ps(from.q + k), x);
    return _mm256_add_ps(_mm256_add_ps(from_g, from_x), _mm256_loadu_ps(from.r + k));
}

// For walk_rows: the rows from start(row) on.
template <Stored stored, Gate gate>
struct GradientRun {
    Backward from;
    s64 at = 0, mask_row = 0;

    GradientRun(const Backward& given, s64 together) : from(with_constants(given, constants_of(given, together))) {}

    BYTEBACK_INLINE void start(s64 row) {
        at = row * from.channels;
        mask_row = row * mask_width(from.channels);
    }

    template <class Lanes>
    BYTEBACK_INLINE __m256 value(s64 e, Lanes lanes) const {
        return gradient_of<stored, gate>(from, at + e, e, mask_row + e / 8, lanes);
    }
};

}  // namespace

}  // namespace byteback::avx2
