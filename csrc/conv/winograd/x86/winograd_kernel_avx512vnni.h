// SPDX-License-Identifier: Apache-2.0
// The multiply of the Winograd path with AVX-512 VNNI: rows of int16 pairs times panels of 16 columns, sums modulo 2^32.
//
// vpdpwssd multiplies and adds in one instruction. A block of sums stays in registers:
//
//     panels   rows   loads for 24 sums
//     1        24     25
//     2        12     14
//     3        8      11
//     4        6      10
//
// A CPU with full-width 512-bit units begins two multiplies in a cycle and two loads. With one panel every multiply reads its
// pair of `a` from memory, so the loads decide: on Zen 5 it reaches 70 % of the peak, blocks of several panels 90 to 95 %. A
// CPU that splits 512-bit instructions begins one multiply in a cycle, and is as fast with any of these blocks.
#pragma once

#include <immintrin.h>

#include <utility>

#include "conv/winograd/winograd_tile.h"

namespace byteback {
namespace {

constexpr int kRows = 24;           // rows at a time: a multiple of the rows of each block
constexpr int kPanelsTogether = 4;  // at most

// Where rows are: rows 0-7 from one pointer on, 8-15 and 16-23 from two more, by what an address can hold.
struct RowSteps {
    s64 one, three, five, seven;

    s64 odd(int count) const { return count == 1 ? one : count == 3 ? three : count == 5 ? five : seven; }
};

// sum[j] += a[0] * b[0][j] + a[1] * b[1][j] for 16 columns j, where a is row kRow (0 to 7) counted from `a`. In assembly, or
// gcc 12 would keep sums in memory and calculate every address by itself.
template <int kRow>
__attribute__((always_inline)) inline void multiply_pair(__m512i& sum, __m512i b, const char* a, const RowSteps& step) {
    if constexpr (kRow == 0)
        asm volatile("vpdpwssd (%[a])%{1to16%}, %[b], %[sum]" : [sum] "+v"(sum) : [b] "v"(b), [a] "r"(a));
    else if constexpr (kRow % 2 == 1)
        asm volatile("vpdpwssd (%[a],%[step])%{1to16%}, %[b], %[sum]"
                     : [sum] "+v"(sum)
                     : [b] "v"(b), [a] "r"(a), [step] "r"(step.odd(kRow)));
    else if constexpr (kRow == 4)
        asm volatile("vpdpwssd (%[a],%[step],4)%{1to16%}, %[b], %[sum]"
                     : [sum] "+v"(sum)
                     : [b] "v"(b), [a] "r"(a), [step] "r"(step.one));
    else
        asm volatile("vpdpwssd (%[a],%[step],2)%{1to16%}, %[b], %[sum]"
                     : [sum] "+v"(sum)
                     : [b] "v"(b), [a] "r"(a), [step] "r"(step.odd(kRow / 2)));
}

// The pair of row kRow (0 to 7) in all lanes.
template <int kRow>
__attribute__((always_inline)) inline __m512i read_pair(const char* a, const RowSteps& step) {
    __m512i pair;
    if constexpr (kRow == 0)
        asm volatile("vpbroadcastd (%[a]), %[pair]" : [pair] "=v"(pair) : [a] "r"(a));
    else if constexpr (kRow % 2 == 1)
        asm volatile("vpbroadcastd (%[a],%[step]), %[pair]" : [pair] "=v"(pair) : [a] "r"(a), [step] "r"(step.odd(kRow)));
    else if constexpr (kRow == 4)
        asm volatile("vpbroadcastd (%[a],%[step],4), %[pair]" : [pair] "=v"(pair) : [a] "r"(a), [step] "r"(step.one));
    else
        asm volatile("vpbroadcastd (%[a],%[step],2), %[pair]" : [pair] "=v"(pair) : [a] "r"(a), [step] "r"(step.odd(kRow / 2)));
    return pair;
}

__attribute__((always_inline)) inline void multiply_add(__m512i& sum, __m512i a, __m512i b) {
    asm volatile("vpdpwssd %[b], %[a], %[sum]" : [sum] "+v"(sum) : [a] "v"(a), [b] "v"(b));
}

// Row kRow (0 to 23) times each panel.
template <int kRow, int kPanels>
__attribute__((always_inline)) inline void multiply_row(__m512i* sums, const __m512i (&b)[kPanels],
                                                        const char* const (&bases)[3], const RowSteps& step) {
    if constexpr (kPanels == 1) {
        multiply_pair<kRow % 8>(sums[kRow], b[0], bases[kRow / 8], step);
    } else {
        const __m512i a = read_pair<kRow % 8>(bases[kRow / 8], step);
        multiply_add(sums[kRow * kPanels], a, b[0]);
        multiply_add(sums[kRow * kPanels + 1], a, b[1]);
        if constexpr (kPanels > 2) multiply_add(sums[kRow * kPanels + 2], a, b[2]);
        if constexpr (kPanels > 3) multiply_add(sums[kRow * kPanels + 3], a, b[3]);
    }
}

// The compiler must not know how `to` was made: it would calculate the address of every store before the loop.
__attribute__((always_inline)) inline s32* next_panel(s32* to, const Multiply& m) {
    to += m.products_panel;
    asm("" : "+r"(to));
    return to;
}

template <int kPanels, int... kRow, int... kSum>
__attribute__((always_inline)) inline void multiply_block(std::integer_sequence<int, kRow...>,
                                                          std::integer_sequence<int, kSum...>, const Multiply& m, Ahead ahead) {
    asm volatile("" ::: "memory");  // multiply_row does not tell the compiler that it reads what was stored so far
    const RowSteps steps{m.row, 3 * m.row, 5 * m.row, 7 * m.row};
    const char* bases[3] = {m.a, m.a + 8 * m.row, m.a + 16 * m.row};
    const s16* columns = m.b;
    s64 pairs = m.pairs;
    __m512i sums[sizeof...(kSum)];
    ((sums[kSum] = _mm512_setzero_si512()), ...);
    do {
        __m512i b[kPanels];
        b[0] = _mm512_load_si512(columns);
        if constexpr (kPanels > 1) b[1] = _mm512_load_si512(columns + m.b_panel);
        if constexpr (kPanels > 2) b[2] = _mm512_load_si512(columns + 2 * m.b_panel);
        if constexpr (kPanels > 3) b[3] = _mm512_load_si512(columns + 3 * m.b_panel);
        (multiply_row<kRow>(sums, b, bases, steps), ...);
        _mm_prefetch(ahead.at, _MM_HINT_T0);
        ahead.at += ahead.step;
        for (const char*& base : bases) base += m.step;
        columns += 2 * kPanel;
    } while (--pairs);
    s32* to[kPanels];
    to[0] = m.products;
    if constexpr (kPanels > 1) to[1] = next_panel(to[0], m);
    if constexpr (kPanels > 2) to[2] = next_panel(to[1], m);
    if constexpr (kPanels > 3) to[3] = next_panel(to[2], m);
    (_mm512_store_si512(to[kSum % kPanels] + kSum / kPanels * kTile, sums[kSum]), ...);
}

template <int kPanels, int kCount>
__attribute__((noinline)) void multiply_exactly(Multiply m, Ahead ahead, const Repeat& repeat) {
    for (s64 i = 0; i < repeat.count; ++i) {
        multiply_block<kPanels>(std::make_integer_sequence<int, kCount>(), std::make_integer_sequence<int, kCount * kPanels>(),
                                m, ahead);
        m.a += repeat.a, ahead.at += repeat.a, m.b += repeat.b, m.products += repeat.products;
    }
}

template <int kPanels, int... kBefore>
inline void multiply_any(std::integer_sequence<int, kBefore...>, s64 rows, const Multiply& m, const Ahead& ahead,
                         const Repeat& repeat) {
    static constexpr void (*kernels[])(Multiply, Ahead, const Repeat&) = {multiply_exactly<kPanels, kBefore + 1>...};
    kernels[rows - 1](m, ahead, repeat);
}

// As few blocks as there can be, of the same number of rows but for the last.
template <int kPanels>
inline void multiply_rows(s64 rows, Multiply m, Ahead ahead) {
    constexpr int kMost = kRows / kPanels;
    const s64 count = ceil_div(rows, ceil_div(rows, kMost)), blocks = rows / count, rest = rows % count;
    const Repeat repeat{blocks, count * m.row, 0, count * kTile};
    multiply_any<kPanels>(std::make_integer_sequence<int, kMost>(), count, m, ahead, repeat);
    if (rest == 0) return;
    m.a += blocks * repeat.a, ahead.at += blocks * repeat.a, m.products += blocks * repeat.products;
    multiply_any<kPanels>(std::make_integer_sequence<int, kMost>(), rest, m, ahead, {});
}

// 1 to 24 rows and any number of panels; `repeat` is for one.
inline void multiply(s64 rows, s64 panels, Multiply m, const Ahead& ahead, const Repeat& repeat = {}) {
    if (panels == 1) return multiply_any<1>(std::make_integer_sequence<int, kRows>(), rows, m, ahead, repeat);
    for (; panels > 0; panels -= kPanelsTogether) {
        switch (panels) {
            case 1: multiply_rows<1>(rows, m, ahead); break;
            case 2: multiply_rows<2>(rows, m, ahead); break;
            case 3: multiply_rows<3>(rows, m, ahead); break;
            default: multiply_rows<4>(rows, m, ahead);
        }
        m.b += kPanelsTogether * m.b_panel, m.products += kPanelsTogether * m.products_panel;
    }
}

}  // namespace
}  // namespace byteback
