// SPDX-License-Identifier: Apache-2.0
// The vectors of the AVX-512 VNNI path's Winograd: 32 values of 16 bits, or 16 of 32, a cache line each.
#pragma once

// gcc 12 takes its own "undefined" vectors for mistakes.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "conv/winograd/x86/winograd_panel.h"

namespace byteback {
namespace {

using V = __m512i;
using Half = __m256i;  // 16 channels of 16 bits
using Floats = __m512;

constexpr int kLanes = 16;             // of 32 bits
constexpr int kChannels = 2 * kLanes;  // of 16 bits
constexpr int kVectors = kPanel / kLanes;
constexpr s64 kProducts = 1536;  // tiles times result channels whose products are kept, in the second-level cache
// Of transformed weights. Four panels of 512 channels fit; they need not stay in the second-level cache, because every line is
// multiplied with 24 rows at a time. Fewer panels at a time would read the transformed inputs more often.
constexpr s64 kWeightBytes = 2400 << 10;
constexpr s64 kAheadBytes = 6 << 20;  // of a thread's transformed inputs, in the third-level cache
constexpr s64 kInputPanels = 2;       // of grad_weight, in the second-level cache

inline V load(const void* from) { return _mm512_load_si512(from); }
inline void store(void* to, V v) { _mm512_store_si512(to, v); }

inline V zero() { return _mm512_setzero_si512(); }
inline V add16(V a, V b) { return _mm512_add_epi16(a, b); }
inline V sub16(V a, V b) { return _mm512_sub_epi16(a, b); }
inline V shl16(V a, unsigned n) { return _mm512_slli_epi16(a, n); }
inline V mul16(V a, s16 n) { return _mm512_mullo_epi16(a, _mm512_set1_epi16(n)); }
inline V add32(V a, V b) { return _mm512_add_epi32(a, b); }
inline V sub32(V a, V b) { return _mm512_sub_epi32(a, b); }
inline V shl32(V a, unsigned n) { return _mm512_slli_epi32(a, n); }
inline V sar32(V a, unsigned n) { return _mm512_srai_epi32(a, n); }
inline V mul32(V a, s32 n) { return _mm512_mullo_epi32(a, _mm512_set1_epi32(n)); }

inline Half add16(Half a, Half b) { return _mm256_add_epi16(a, b); }
inline Half sub16(Half a, Half b) { return _mm256_sub_epi16(a, b); }
inline Half shl16(Half a, int n) { return _mm256_slli_epi16(a, n); }

inline Floats load_floats(const f32* from) { return _mm512_load_ps(from); }
inline Floats scale(V v, Floats factor) { return _mm512_mul_ps(_mm512_cvtepi32_ps(v), factor); }
inline void stream_floats(f32* to, Floats v) { _mm512_stream_ps(to, v); }

// The first `count` floats; none where count <= 0.
inline void store_floats(f32* to, Floats v, s64 count) {
    if (count >= 16) return _mm512_storeu_ps(to, v);
    if (count > 0) _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), v);
}

inline V widen(__m256i bytes) { return _mm512_cvtepi8_epi16(bytes); }
inline Half widen(__m128i bytes) { return _mm256_cvtepi8_epi16(bytes); }
inline Half widen_to_pair(__m128i bytes) { return widen(bytes); }

// 32 channels, or 16 and as many zeros.
inline void store_channels(void* to, V v) { store(to, v); }
inline void store_channels(void* to, Half v) { store(to, _mm512_zextsi256_si512(v)); }

// 16 channels of two tiles as [channel][2].
inline void store_pair(s16* to, Half even, Half odd) {
    const V order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                     39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    store(to, _mm512_permutex2var_epi16(_mm512_castsi256_si512(even), order, _mm512_castsi256_si512(odd)));
}

// 16 or 32 channels; the tails read fewer, and zeros for the rest.
struct LoadPanel {
    __m128i operator()(const s8* p) const { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
};
struct LoadPanelTail {
    __mmask16 mask;
    __m128i operator()(const s8* p) const { return _mm_maskz_loadu_epi8(mask, p); }
};
struct LoadVector {
    __m256i operator()(const s8* p) const { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
};
struct LoadVectorTail {
    __mmask32 mask;
    __m256i operator()(const s8* p) const { return _mm256_maskz_loadu_epi8(mask, p); }
};
using LoadWhole = LoadPanel;

// body(c, load) for each panel of 16 channels, the last one perhaps with a tail.
template <class Body>
inline void for_panels(s64 begin, s64 end, s64, const Body& body) {
    s64 c = begin;
    for (; c + 16 <= end; c += 16) body(c, LoadPanel());
    if (c < end) body(c, LoadPanelTail{static_cast<__mmask16>((1u << (end - c)) - 1)});
}

// The same for each vector of 32 channels; 16 channels are half a vector.
template <class Body>
inline void for_vectors(s64 begin, s64 end, s64, const Body& body) {
    s64 c = begin;
    for (; c + 32 <= end; c += 32) body(c, LoadVector());
    if (end - c == 16)
        body(c, LoadPanel());
    else if (c < end)
        body(c, LoadVectorTail{(1u << (end - c)) - 1});
}

// Two tiles of 16 channels as pairs: [position][channel][2], `stride` values from position to position. Bytes are interleaved
// before they are widened, so that one transform does both tiles.
template <class Transform, class Even, class Odd>
__attribute__((always_inline)) inline void transform_pair(const Even& even, const Odd& odd, s16* to, s64 stride) {
    const auto read = [&](int i) {
        const __m128i a = even(i), b = odd(i);
        return widen(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)));
    };
    transform_tile<Transform>(read, [&](int position, V v) { store(to + position * stride, v); });
}

}  // namespace
}  // namespace byteback
