// SPDX-License-Identifier: Apache-2.0
// The vectors of the AVX2 path's depthwise kernels: 8 channels of 32 bits, 8 pairs of 16 bits, or 16 channels of 16 bits.
//
// The other headers of depthwise.h use no instruction set: another path needs another header with these names.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "core/types.h"

#define BYTEBACK_PATH avx2

namespace byteback {
namespace {

using V = __m256i;
using Floats = __m256;

constexpr s64 kBlock = 8;          // channels in a vector of int32
constexpr s64 kCell = 2 * kBlock;  // int16 values of one column of a row pair in one block
constexpr s64 kLane = 16;          // channels of 16 bits that are taken together: a cache line of results

// Aligned.
inline V load(const void* p) { return _mm256_load_si256(static_cast<const V*>(p)); }
inline void store(void* p, V v) { _mm256_store_si256(static_cast<V*>(p), v); }
inline V zero() { return _mm256_setzero_si256(); }
inline Floats load_floats(const f32* p) { return _mm256_load_ps(p); }
inline void end_streams() { _mm_sfence(); }  // behind what was written past the caches

// ---- row pairs: a block of channels ----------------------------------------------------------------------------------

// sum + x · w over pairs. Left to itself gcc reorders the additions, then loads twice and spills: twice as slow.
[[gnu::always_inline]] inline V multiply_add(V sum, V x, V w) {
    V product;
    asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "xm"(w), "x"(x));
    return sum;
}

[[gnu::always_inline]] inline V multiply(V x, V w) {
    V product;
    asm("vpmaddwd %1, %2, %0" : "=x"(product) : "xm"(w), "x"(x));
    return product;
}

// Sums of a block as floats.
[[gnu::always_inline]] inline void write_block(V sums, Floats factors, f32* to) {
    _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(sums), factors));
}

// Two blocks, a cache line, past the caches.
inline void stream_line(const f32* from, f32* to) {
    _mm256_stream_ps(to, _mm256_load_ps(from));
    _mm256_stream_ps(to + kBlock, _mm256_load_ps(from + kBlock));
}

// 16 bytes of which `count` may be read, the others zero.
inline __m128i load_bytes(const s8* p, s64 count) {
    if (count >= 16) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    alignas(16) s8 bytes[16] = {};
    std::memcpy(bytes, p, static_cast<size_t>(count));
    return _mm_load_si128(reinterpret_cast<const __m128i*>(bytes));
}

// Two whole blocks of rows a and b as cells. Bytes are interleaved before they are widened: so the channels stay in order.
[[gnu::always_inline]] inline void pair_two_blocks(const s8* a, const s8* b, s16* first, s16* second) {
    const __m128i va = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
    const __m128i vb = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
    store(first, _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(va, vb)));
    store(second, _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(va, vb)));
}

// One block, of which only `count` channels exist.
inline void pair_some(const s8* a, const s8* b, s64 count, s16* to) {
    store(to, _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(load_bytes(a, count), load_bytes(b, count))));
}

// Weights a and b of a block, already widened, as a cell.
inline void pair_weights(const s16* a, const s16* b, s16* to) {
    const __m128i va = _mm_load_si128(reinterpret_cast<const __m128i*>(a));
    const __m128i vb = _mm_load_si128(reinterpret_cast<const __m128i*>(b));
    store(to, _mm256_set_m128i(_mm_unpackhi_epi16(va, vb), _mm_unpacklo_epi16(va, vb)));
}

// ---- lanes: 16 channels of 16 bits -------------------------------------------------------------------------------------

inline V mul16(V a, V b) { return _mm256_mullo_epi16(a, b); }
inline V add16(V a, V b) { return _mm256_add_epi16(a, b); }

[[gnu::always_inline]] inline V widen_bytes(const s8* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline V widen_some(const s8* p, s64 count) { return _mm256_cvtepi8_epi16(load_bytes(p, count)); }

// int32 sums of channels 0..7 and 8..15 as floats.
template <bool Stream>
[[gnu::always_inline]] inline void write_lane(V first, V second, const f32* factors, f32* out) {
    const Floats y[2] = {_mm256_mul_ps(_mm256_cvtepi32_ps(first), _mm256_load_ps(factors)),
                         _mm256_mul_ps(_mm256_cvtepi32_ps(second), _mm256_load_ps(factors + 8))};
    for (int i = 0; i < 2; ++i) Stream ? _mm256_stream_ps(out + 8 * i, y[i]) : _mm256_storeu_ps(out + 8 * i, y[i]);
}

// A lane's int32 sums, in order.
struct OrderedSums {
    V first = zero(), second = zero();

    void add(V sum) {
        first = _mm256_add_epi32(first, _mm256_cvtepi16_epi32(_mm256_castsi256_si128(sum)));
        second = _mm256_add_epi32(second, _mm256_cvtepi16_epi32(_mm256_extracti128_si256(sum, 1)));
    }
    void write(const f32* factors, f32* out) const { write_lane<false>(first, second, factors, out); }
};

// A lane's int32 sums as unpacking leaves them, which works within halves: low has channels 0..3 and 8..11.
struct Wide {
    V low, high;

    // A row of three taps, its weights as pack_row_taps has made them.
    [[gnu::always_inline]] void set_row(V x0, V x1, V x2, const s16* w) {
        const V two = add16(mul16(x0, load(w)), mul16(x1, load(w + kLane)));
        low = _mm256_madd_epi16(_mm256_unpacklo_epi16(x2, two), load(w + 2 * kLane));
        high = _mm256_madd_epi16(_mm256_unpackhi_epi16(x2, two), load(w + 3 * kLane));
    }
    [[gnu::always_inline]] void add_row(V x0, V x1, V x2, const s16* w) {
        Wide more;
        more.set_row(x0, x1, x2, w);
        low = _mm256_add_epi32(low, more.low);
        high = _mm256_add_epi32(high, more.high);
    }

    template <bool Stream>
    void write(const f32* factors, f32* out) const {
        write_lane<Stream>(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31), factors,
                           out);
    }
};

constexpr s64 kRowTaps = 4 * kLane;  // int16 values that a row of taps takes: w0, w1, low (w2, 1), high (w2, 1)

// From w0, w1, w2.
inline void pack_row_taps(s16* packed) {
    const V ones = _mm256_set1_epi16(1), third = load(packed + 2 * kLane);
    store(packed + 2 * kLane, _mm256_unpacklo_epi16(third, ones));
    store(packed + 3 * kLane, _mm256_unpackhi_epi16(third, ones));
}

// Sums in int16, a or a + b, as floats.
template <bool Stream>
[[gnu::always_inline]] inline void write_sum(V a, const f32* factors, f32* out) {
    const V first = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(a));
    write_lane<Stream>(first, _mm256_cvtepi16_epi32(_mm256_extracti128_si256(a, 1)), factors, out);
}

template <bool Stream>
[[gnu::always_inline]] inline void write_sum(V a, V b, const f32* factors, f32* out) {
    const V ones = _mm256_set1_epi16(1);
    const Wide sum{_mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), ones), _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), ones)};
    sum.write<Stream>(factors, out);
}

}  // namespace
}  // namespace byteback
