// SPDX-License-Identifier: Apache-2.0
// The multiply of the Winograd path with AVX2: rows of int16 pairs times panels of 16 columns, sums modulo 2^32.
#pragma once

#include <immintrin.h>

#include "conv/winograd/winograd_tile.h"

namespace byteback {
namespace {

constexpr int kRows = 6;  // rows at a time: 12 accumulators, 2 operands and 2 temporaries fill the registers

using PairAlias = s32 __attribute__((may_alias));

// sums += (a[0] * b[0][j] + a[1] * b[1][j]) for 16 columns j. In assembly because gcc 12 would spill accumulators; both
// multiplies before both additions is a few percent faster than alternating.
__attribute__((always_inline)) inline void multiply_row(__m256i& low, __m256i& high, __m256i b_low, __m256i b_high,
                                                        const char* a) {
    __m256i pair, product;
    asm volatile(
        "vbroadcastss %[a], %[pair]\n\t"
        "vpmaddwd %[b_low], %[pair], %[product]\n\t"
        "vpmaddwd %[b_high], %[pair], %[pair]\n\t"
        "vpaddd %[product], %[low], %[low]\n\t"
        "vpaddd %[pair], %[high], %[high]"
        : [low] "+x"(low), [high] "+x"(high), [pair] "=&x"(pair), [product] "=&x"(product)
        : [b_low] "x"(b_low), [b_high] "x"(b_high), [a] "m"(*reinterpret_cast<const PairAlias*>(a)));
}

// One panel of Multiply.
template <int kCount>
__attribute__((always_inline)) inline void multiply_once(const char* a, s64 row, s64 step, const s16* b, s64 pairs,
                                                         s32* products, Ahead ahead) {
    // Named sums: of an array gcc 12 keeps a copy in memory.
    const __m256i zero = _mm256_setzero_si256();
    __m256i low0 = zero, low1 = zero, low2 = zero, low3 = zero, low4 = zero, low5 = zero;
    __m256i high0 = zero, high1 = zero, high2 = zero, high3 = zero, high4 = zero, high5 = zero;
    const char* a3 = a + 3 * row;
    do {
        const __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(b));
        const __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i*>(b) + 1);
        multiply_row(low0, high0, low, high, a);
        if constexpr (kCount > 1) multiply_row(low1, high1, low, high, a + row);
        if constexpr (kCount > 2) multiply_row(low2, high2, low, high, a + 2 * row);
        if constexpr (kCount > 3) multiply_row(low3, high3, low, high, a3);
        if constexpr (kCount > 4) multiply_row(low4, high4, low, high, a3 + row);
        if constexpr (kCount > 5) multiply_row(low5, high5, low, high, a3 + 2 * row);
        _mm_prefetch(ahead.at, _MM_HINT_T0);
        ahead.at += ahead.step;
        a += step;
        a3 += step;
        b += 2 * kPanel;
    } while (--pairs);
    const auto store = [&](int i, __m256i low, __m256i high) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(products + i * kTile), low);
        _mm256_store_si256(reinterpret_cast<__m256i*>(products + i * kTile) + 1, high);
    };
    store(0, low0, high0);
    if constexpr (kCount > 1) store(1, low1, high1);
    if constexpr (kCount > 2) store(2, low2, high2);
    if constexpr (kCount > 3) store(3, low3, high3);
    if constexpr (kCount > 4) store(4, low4, high4);
    if constexpr (kCount > 5) store(5, low5, high5);
}

template <int kCount>
__attribute__((noinline)) void multiply_rows(const Multiply& m, Ahead ahead, const Repeat& repeat) {
    const char* a = m.a;
    const s16* b = m.b;
    s32* products = m.products;
    for (s64 i = 0; i < repeat.count; ++i) {
        multiply_once<kCount>(a, m.row, m.step, b, m.pairs, products, ahead);
        a += repeat.a, ahead.at += repeat.a, b += repeat.b, products += repeat.products;
    }
}

// 1 to 6 rows and any number of panels; `repeat` is for one.
inline void multiply(s64 rows, s64 panels, const Multiply& m, Ahead ahead, Repeat repeat = {}) {
    if (panels > 1) repeat = {panels, 0, m.b_panel, m.products_panel};
    switch (rows) {
        case 1: return multiply_rows<1>(m, ahead, repeat);
        case 2: return multiply_rows<2>(m, ahead, repeat);
        case 3: return multiply_rows<3>(m, ahead, repeat);
        case 4: return multiply_rows<4>(m, ahead, repeat);
        case 5: return multiply_rows<5>(m, ahead, repeat);
        default: return multiply_rows<6>(m, ahead, repeat);
    }
}

}  // namespace
}  // namespace byteback
