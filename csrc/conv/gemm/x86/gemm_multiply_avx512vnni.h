// SPDX-License-Identifier: Apache-2.0
// The blocks of vpdpbusd: 1 to 14 rows by 8, 16 or 32 columns of sums, which stay in registers until they are written.
//
//   columns   vectors of a row   sums in registers
//   17 to 32  2 of 512 bits      up to 28: with these, two multiplies can begin in every cycle on any CPU
//   9 to 16   1 of 512 bits      up to 14
//   1 to 8    1 of 256 bits      up to 14: half the work where a CPU splits 512-bit instructions
//
// A row costs a load that broadcasts 4 bytes of A, and a multiply for each vector of B. Every number of rows has its own code,
// so no row is multiplied in vain: images of 7x7 or 14x14 pixels and 64 channels are no multiples of 14.
#pragma once

// gcc 12 warns of registers that its own headers leave uninitialized on purpose.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <algorithm>
#include <utility>

#include "conv/gemm/gemm_block.h"

namespace byteback {
namespace {

constexpr int kMostRows = 14;

using Bytes4 = s32 __attribute__((may_alias));

inline void broadcast(__m512i& to, const char* from) {
    asm volatile("vpbroadcastd %[from], %[to]" : [to] "=v"(to) : [from] "m"(*reinterpret_cast<const Bytes4*>(from)));
}
inline void broadcast(__m256i& to, const char* from) {
    asm volatile("vpbroadcastd %[from], %[to]" : [to] "=v"(to) : [from] "m"(*reinterpret_cast<const Bytes4*>(from)));
}
inline void multiply_add(__m512i& sum, __m512i a, __m512i b) {
    asm volatile("vpdpbusd %[b], %[a], %[sum]" : [sum] "+v"(sum) : [a] "v"(a), [b] "v"(b));
}
inline void multiply_add(__m256i& sum, __m256i a, __m256i b) {
    asm volatile("vpdpbusd %[b], %[a], %[sum]" : [sum] "+v"(sum) : [a] "v"(a), [b] "v"(b));
}

inline void read(__m512i& to, const void* from) { to = _mm512_loadu_si512(from); }
inline void read(__m256i& to, const void* from) { to = _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// Where rows are: 0 to 6 from one pointer on, 7 to 13 from another, by what an address can hold.
struct RowSteps {
    s64 one, three, five;
};

template <int kRow>
inline const char* address(const char* const (&bases)[2], const RowSteps& step) {
    constexpr int k = kRow % 7;
    const char* base = bases[kRow / 7];
    if constexpr (k == 0) return base;
    if constexpr (k == 3) return base + step.three;
    if constexpr (k == 5) return base + step.five;
    if constexpr (k == 6) return base + 2 * step.three;
    return base + k * step.one;
}

template <int kRow, class Vector, int kVectors>
__attribute__((always_inline)) inline void multiply_row(Vector* sums, const Vector (&b)[kVectors],
                                                        const char* const (&bases)[2], const RowSteps& step) {
    Vector quad;
    broadcast(quad, address<kRow>(bases, step));
    multiply_add(sums[kRow * kVectors], quad, b[0]);
    if constexpr (kVectors > 1) multiply_add(sums[kRow * kVectors + 1], quad, b[1]);
}

// sums[row * kVectors + vector]. Whatever indexes them is a constant, from a pack and not from a loop, else gcc keeps them in
// memory.
template <class Vector, int kVectors, int... kRow>
__attribute__((always_inline)) inline void multiply_rows(std::integer_sequence<int, kRow...>, const GemmBlock& block,
                                                         Vector* sums) {
    Vector start[2];
    read(start[0], block.starts);
    if constexpr (kVectors > 1) read(start[1], block.starts + kColumns);
    ((sums[kRow * kVectors] = start[0], sums[kRow * kVectors + kVectors - 1] = start[kVectors - 1]), ...);
    RowSteps steps{block.row, 3 * block.row, 5 * block.row};
    asm("" : "+r"(steps.one), "+r"(steps.three), "+r"(steps.five));  // else the compiler makes a pointer for every row
    for (const Stretch *s = block.depth, *end = s + block.stretches; s < end; ++s) {
        const char *bases[2] = {s->A, s->A + 7 * block.row}, *B = s->B;
        s64 left = s->steps;
        do {
            Vector b[kVectors];
            read(b[0], B);
            if constexpr (kVectors > 1) read(b[1], B + block.panel);
            (multiply_row<kRow>(sums, b, bases, steps), ...);
            bases[0] += block.step;
            if constexpr (sizeof...(kRow) > 7) bases[1] += block.step;
            B += 64;
        } while (--left);
    }
}

inline void fetch_to_write(const void* line) { asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line))); }

inline void write_sums(__m512i sums, s32* to, bool add) {
    _mm512_storeu_si512(to, add ? _mm512_add_epi32(sums, _mm512_loadu_si512(to)) : sums);
}
inline void write_sums(__m256i sums, s32* to, bool add) {
    __m256i* at = reinterpret_cast<__m256i*>(to);
    _mm256_storeu_si256(at, add ? _mm256_add_epi32(sums, _mm256_loadu_si256(at)) : sums);
}

template <class Vector, int kVectors, int kCount, int... kAt>
__attribute__((always_inline)) inline void multiply_and_write(std::integer_sequence<int, kAt...>, const GemmBlock& block,
                                                              const SumsTo& out) {
    const auto at = [&](int i) { return out.to + i / kVectors * out.stride + i % kVectors * out.panel; };
    if (out.add) (fetch_to_write(at(kAt)), ...);
    Vector sums[kCount * kVectors];
    multiply_rows<Vector, kVectors>(std::make_integer_sequence<int, kCount>(), block, sums);
    (write_sums(sums[kAt], at(kAt), out.add), ...);
}

// The factors of the columns of a block, and which of its columns there are.
template <int kVectors>
struct Scales {
    __m512 factors[kVectors];
    __mmask16 there[kVectors];

    Scales(const f32* from, bool vary, s64 columns) {
        for (int v = 0; v < kVectors; ++v) {
            const s64 n = std::min<s64>(columns - v * kColumns, kColumns);
            there[v] = static_cast<__mmask16>((1u << n) - 1);
            factors[v] = vary ? _mm512_maskz_loadu_ps(there[v], from + v * kColumns) : _mm512_set1_ps(*from);
        }
    }

    void write(int v, __m512i sums, f32* to, bool stream) const {
        const __m512 floats = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), factors[v]);
        if (stream)
            _mm512_stream_ps(to, floats);
        else
            _mm512_mask_storeu_ps(to, there[v], floats);
    }
    void write(int v, __m256i sums, f32* to, bool) const { write(v, _mm512_zextsi256_si512(sums), to, false); }
};

template <class Vector, int kVectors, int kCount, int... kAt>
__attribute__((always_inline)) inline void multiply_and_write(std::integer_sequence<int, kAt...>, const GemmBlock& block,
                                                              const FloatsTo& out) {
    const auto at = [&](int i) { return out.rows[i / kVectors] + out.column + i % kVectors * kColumns; };
    if (!out.stream) (fetch_to_write(at(kAt)), ...);
    Vector sums[kCount * kVectors];
    multiply_rows<Vector, kVectors>(std::make_integer_sequence<int, kCount>(), block, sums);
    const Scales<kVectors> scales(out.factors, out.vary, block.columns);
    ((out.rows[kAt / kVectors] ? scales.write(kAt % kVectors, sums[kAt], at(kAt), out.stream) : void()), ...);
}

template <class Vector, int kVectors, int kCount, class Out>
__attribute__((noinline)) void multiply_exactly(const GemmBlock& block, const Out& out) {
    multiply_and_write<Vector, kVectors, kCount>(std::make_integer_sequence<int, kCount * kVectors>(), block, out);
}

template <class Vector, int kVectors, class Out, int... kBefore>
inline void multiply_any(std::integer_sequence<int, kBefore...>, const GemmBlock& block, const Out& out) {
    static constexpr void (*kernels[])(const GemmBlock&,
                                       const Out&) = {multiply_exactly<Vector, kVectors, kBefore + 1, Out>...};
    kernels[block.rows - 1](block, out);
}

template <class Out>
inline void multiply_quads(const GemmBlock& block, const Out& out) {
    constexpr auto kCounts = std::make_integer_sequence<int, kMostRows>();
    if (block.columns > 16)
        multiply_any<__m512i, 2>(kCounts, block, out);
    else if (block.columns > 8)
        multiply_any<__m512i, 1>(kCounts, block, out);
    else
        multiply_any<__m256i, 1>(kCounts, block, out);
}

}  // namespace
}  // namespace byteback
