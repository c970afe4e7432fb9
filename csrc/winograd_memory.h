// SPDX-License-Identifier: Apache-2.0
// The small change of the Winograd path: scratch memory cut into arrays, factors, and stores of fewer than 8 floats.
//
// For winograd_avx2.cpp only: AVX2 code in an anonymous namespace.
#pragma once

#include <immintrin.h>

#include "parallel.h"
#include "winograd_transform.h"

namespace byteback::avx2 {
namespace {

struct SharedTag;
struct ThreadTag;

// Cuts one piece of memory into aligned arrays: first add up the sizes, then hand them out.
class Arena {
public:
    template <class T>
    void reserve(T*& pointer, s64 count) {
        const s64 at = bytes_;
        bytes_ += round_up(count * static_cast<s64>(sizeof(T)), 64);
        if (base_) pointer = reinterpret_cast<T*>(base_ + at);
    }
    s64 bytes() const { return bytes_; }
    void begin(char* base) {
        base_ = base;
        bytes_ = 0;
    }

private:
    char* base_ = nullptr;
    s64 bytes_ = 0;
};

void read_factors(Factor factor, s64 row, s64 column, s64 count, f32 out[kPanel]) {
    for (s64 j = 0; j < kPanel; ++j) out[j] = j < count ? factor.at(row, column + j) : 0.0f;
}

// The first `count` of 8 floats; none where count <= 0.
inline void store_floats(f32* to, __m256 v, s64 count) {
    if (count >= 8) return _mm256_storeu_ps(to, v);
    if (count <= 0) return;
    const V lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_maskstore_ps(to, _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane), v);
}

}  // namespace
}  // namespace byteback::avx2
