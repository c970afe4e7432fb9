// SPDX-License-Identifier: Apache-2.0
// The multiply of the Winograd path with AVX-512 VNNI: rows of int16 pairs times panels of 16 columns, sums modulo 2^32.
//
// vpdpwssd multiplies and adds in one instruction and reads a pair of `a` from memory for all its lanes, so 24 rows of sums
// stay in registers and there are few other instructions: on Zen 4 it runs within a few percent of the peak.
#pragma once

#include <immintrin.h>

#include <utility>

#include "conv/winograd/winograd_tile.h"

namespace byteback {
namespace {

constexpr int kRows = 24;  // rows at a time

// Where rows are: rows 0-7 from one pointer on, 8-15 and 16-23 from two more, by what an address can hold.
struct RowSteps {
    s64 one, three, five, seven;
};

// sum[j] += a[0] * b[0][j] + a[1] * b[1][j] for 16 columns j, where a is row kRow (0 to 7) counted from `a`.
template <int kRow>
__attribute__((always_inline)) inline void multiply_row(__m512i& sum, __m512i b, const char* a, const RowSteps& step) {
    if constexpr (kRow == 0)
        asm volatile("vpdpwssd (%[a])%{1to16%}, %[b], %[sum]" : [sum] "+v"(sum) : [b] "v"(b), [a] "r"(a));
    else if constexpr (kRow % 2 == 1)
        asm volatile("vpdpwssd (%[a],%[step])%{1to16%}, %[b], %[sum]"
                     : [sum] "+v"(sum)
                     : [b] "v"(b), [a] "r"(a),
                       [step] "r"(kRow == 1   ? step.one
                                  : kRow == 3 ? step.three
                                  : kRow == 5 ? step.five
                                              : step.seven));
    else if constexpr (kRow == 4)
        asm volatile("vpdpwssd (%[a],%[step],4)%{1to16%}, %[b], %[sum]"
                     : [sum] "+v"(sum)
                     : [b] "v"(b), [a] "r"(a), [step] "r"(step.one));
    else
        asm volatile("vpdpwssd (%[a],%[step],2)%{1to16%}, %[b], %[sum]"
                     : [sum] "+v"(sum)
                     : [b] "v"(b), [a] "r"(a), [step] "r"(kRow == 2 ? step.one : step.three));
}

// products[i * kTile + j] = Σ_pair a[i, pair] · b[pair, j], for at least one pair. Row i of a begins at a + i * row bytes, its
// next pair is `step` bytes on, so that rows may lie one after the other (output) or interleaved (grad_weight). b is dense, 64
// bytes a pair.
template <int... kRow>
__attribute__((always_inline)) inline void multiply_rows(std::integer_sequence<int, kRow...>, const char* a, s64 row, s64 step,
                                                         const s16* b, s64 pairs, s32* products, Ahead ahead) {
    asm volatile("" ::: "memory");  // multiply_row does not tell the compiler that it reads what was stored so far
    const RowSteps steps{row, 3 * row, 5 * row, 7 * row};
    const char* bases[3] = {a, a + 8 * row, a + 16 * row};
    __m512i sums[sizeof...(kRow)];
    ((sums[kRow] = _mm512_setzero_si512()), ...);
    do {
        const __m512i columns = _mm512_load_si512(b);
        (multiply_row<kRow % 8>(sums[kRow], columns, bases[kRow / 8], steps), ...);
        _mm_prefetch(ahead.at, _MM_HINT_T0);
        ahead.at += ahead.step;
        for (const char*& base : bases) base += step;
        b += 2 * kPanel;
    } while (--pairs);
    (_mm512_store_si512(products + kRow * kTile, sums[kRow]), ...);
}

template <int kCount>
__attribute__((noinline)) void multiply_exactly(const char* a, s64 row, s64 step, const s16* b, s64 pairs, s32* products,
                                                Ahead ahead, const Repeat& repeat) {
    for (s64 i = 0; i < repeat.count; ++i) {
        multiply_rows(std::make_integer_sequence<int, kCount>(), a, row, step, b, pairs, products, ahead);
        a += repeat.a, ahead.at += repeat.a, b += repeat.b, products += repeat.products;
    }
}

// The same for 1 to 24 rows.
template <int kCount = kRows>
inline void multiply(s64 rows, const char* a, s64 row, s64 step, const s16* b, s64 pairs, s32* products, Ahead ahead,
                     const Repeat& repeat = {}) {
    if constexpr (kCount > 1)
        if (rows < kCount) return multiply<kCount - 1>(rows, a, row, step, b, pairs, products, ahead, repeat);
    multiply_exactly<kCount>(a, row, step, b, pairs, products, ahead, repeat);
}

}  // namespace
}  // namespace byteback
