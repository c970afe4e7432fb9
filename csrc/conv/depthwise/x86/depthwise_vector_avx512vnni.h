// SPDX-License-Identifier: Apache-2.0
// The vectors of the AVX-512 VNNI path's depthwise kernels: 16 channels of 32 bits, 16 pairs of 16 bits, or 32 channels of 16
// bits. The names are those of depthwise_vector_avx2.h. What differs: vpdpwssd multiplies pairs and adds them at once.
#pragma once

// gcc 12's header makes its "undefined" vectors in a way that gcc 12 warns of.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "core/types.h"

#define BYTEBACK_PATH avx512vnni

namespace byteback {
namespace {

using V = __m512i;
using Floats = __m512;

constexpr s64 kBlock = 16;         // channels in a vector of int32
constexpr s64 kCell = 2 * kBlock;  // int16 values of one column of a row pair in one block
constexpr s64 kLane = 32;          // channels of 16 bits that are taken together: two cache lines of results

// Aligned.
inline V load(const void* p) { return _mm512_load_si512(p); }
inline void store(void* p, V v) { _mm512_store_si512(p, v); }
inline V zero() { return _mm512_setzero_si512(); }
inline Floats load_floats(const f32* p) { return _mm512_load_ps(p); }
inline void end_streams() { _mm_sfence(); }  // behind what was written past the caches

// ---- row pairs: a block of channels ----------------------------------------------------------------------------------

// sum + x · w over pairs.
[[gnu::always_inline]] inline V multiply_add(V sum, V x, V w) {
    asm("vpdpwssd %1, %2, %0" : "+v"(sum) : "vm"(w), "v"(x));
    return sum;
}

[[gnu::always_inline]] inline V multiply(V x, V w) {
    V product;
    asm("vpmaddwd %1, %2, %0" : "=v"(product) : "vm"(w), "v"(x));
    return product;
}

// Sums of a block as floats.
[[gnu::always_inline]] inline void write_block(V sums, Floats factors, f32* to) {
    _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_cvtepi32_ps(sums), factors));
}

// Two blocks, past the caches.
inline void stream_line(const f32* from, f32* to) {
    _mm512_stream_ps(to, _mm512_load_ps(from));
    _mm512_stream_ps(to + kBlock, _mm512_load_ps(from + kBlock));
}

// Two whole blocks of rows a and b as cells. Bytes are interleaved before they are widened: so the channels stay in order.
[[gnu::always_inline]] inline void pair_two_blocks(const s8* a, const s8* b, s16* first, s16* second) {
    const __m256i va = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
    const __m256i vb = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    const __m256i low = _mm256_unpacklo_epi8(va, vb), high = _mm256_unpackhi_epi8(va, vb);
    store(first, _mm512_cvtepi8_epi16(_mm256_permute2x128_si256(low, high, 0x20)));
    store(second, _mm512_cvtepi8_epi16(_mm256_permute2x128_si256(low, high, 0x31)));
}

inline __mmask16 first16(s64 count) { return static_cast<__mmask16>(count >= 16 ? 0xFFFF : (1u << count) - 1); }
inline __mmask32 first32(s64 count) { return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1; }

// One block, of which only `count` channels exist.
inline void pair_some(const s8* a, const s8* b, s64 count, s16* to) {
    const __m128i va = _mm_maskz_loadu_epi8(first16(count), a), vb = _mm_maskz_loadu_epi8(first16(count), b);
    store(to, _mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(va, vb), _mm_unpacklo_epi8(va, vb))));
}

// Weights a and b of a block, already widened, as a cell.
inline void pair_weights(const s16* a, const s16* b, s16* to) {
    const __m512i va = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(a)));
    const __m512i vb = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(b)));
    store(to, _mm512_or_si512(va, _mm512_slli_epi32(vb, 16)));
}

// ---- lanes: 32 channels of 16 bits -------------------------------------------------------------------------------------

inline V mul16(V a, V b) { return _mm512_mullo_epi16(a, b); }
inline V add16(V a, V b) { return _mm512_add_epi16(a, b); }

[[gnu::always_inline]] inline V widen_bytes(const s8* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline V widen_some(const s8* p, s64 count) { return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(first32(count), p)); }

// int32 sums of channels 0..15 and 16..31 as floats.
template <bool Stream>
[[gnu::always_inline]] inline void write_lane(V first, V second, const f32* factors, f32* out) {
    const Floats y[2] = {_mm512_mul_ps(_mm512_cvtepi32_ps(first), _mm512_load_ps(factors)),
                         _mm512_mul_ps(_mm512_cvtepi32_ps(second), _mm512_load_ps(factors + 16))};
    for (int i = 0; i < 2; ++i) Stream ? _mm512_stream_ps(out + 16 * i, y[i]) : _mm512_storeu_ps(out + 16 * i, y[i]);
}

// A lane's int32 sums, in order.
struct OrderedSums {
    V first = zero(), second = zero();

    void add(V sum) {
        first = _mm512_add_epi32(first, _mm512_cvtepi16_epi32(_mm512_castsi512_si256(sum)));
        second = _mm512_add_epi32(second, _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(sum, 1)));
    }
    void write(const f32* factors, f32* out) const { write_lane<false>(first, second, factors, out); }
};

// A lane's int32 sums as unpacking leaves them, which works within quarters: low has channels 0..3, 8..11 and so on.
struct Wide {
    V low, high;

    // A row of three taps, its weights as pack_row_taps has made them.
    [[gnu::always_inline]] void set_row(V x0, V x1, V x2, const s16* w) {
        low = high = zero();
        add_row(x0, x1, x2, w);
    }
    [[gnu::always_inline]] void add_row(V x0, V x1, V x2, const s16* w) {
        const V two = add16(mul16(x0, load(w)), mul16(x1, load(w + kLane)));
        low = multiply_add(low, _mm512_unpacklo_epi16(x2, two), load(w + 2 * kLane));
        high = multiply_add(high, _mm512_unpackhi_epi16(x2, two), load(w + 3 * kLane));
    }

    template <bool Stream>
    void write(const f32* factors, f32* out) const {
        // Quarters of low and high in turn: 0, 4, 1, 5 and 2, 6, 3, 7 of the eight.
        const V order = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), rest = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
        write_lane<Stream>(_mm512_permutex2var_epi64(low, order, high), _mm512_permutex2var_epi64(low, rest, high), factors,
                           out);
    }
};

constexpr s64 kRowTaps = 4 * kLane;  // int16 values that a row of taps takes: w0, w1, low (w2, 1), high (w2, 1)

// From w0, w1, w2.
inline void pack_row_taps(s16* packed) {
    const V ones = _mm512_set1_epi16(1), third = load(packed + 2 * kLane);
    store(packed + 2 * kLane, _mm512_unpacklo_epi16(third, ones));
    store(packed + 3 * kLane, _mm512_unpackhi_epi16(third, ones));
}

// Sums in int16, a or a + b, as floats.
template <bool Stream>
[[gnu::always_inline]] inline void write_sum(V a, const f32* factors, f32* out) {
    const V first = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(a));
    write_lane<Stream>(first, _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(a, 1)), factors, out);
}

template <bool Stream>
[[gnu::always_inline]] inline void write_sum(V a, V b, const f32* factors, f32* out) {
    const V ones = _mm512_set1_epi16(1);
    const Wide sum{_mm512_madd_epi16(_mm512_unpacklo_epi16(a, b), ones), _mm512_madd_epi16(_mm512_unpackhi_epi16(a, b), ones)};
    sum.write<Stream>(factors, out);
}

}  // namespace
}  // namespace byteback
