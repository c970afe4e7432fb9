// SPDX-License-Identifier: Apache-2.0
// The vectors of the AVX2 path's Winograd: 16 values of 16 bits, or 8 of 32.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "conv/winograd/x86/winograd_panel.h"

namespace byteback {
namespace {

using V = __m256i;
using Half = __m256i;  // 16 channels of 16 bits
using Floats = __m256;

constexpr int kLanes = 8;              // of 32 bits
constexpr int kChannels = 2 * kLanes;  // of 16 bits
constexpr int kVectors = kPanel / kLanes;
constexpr s64 kWeightBytes = 600 << 10;  // of transformed weights, to stay in the second-level cache
constexpr s64 kProducts = 2304;          // tiles times result channels whose products are kept, likewise
constexpr s64 kAheadBytes = 3 << 20;     // of a thread's transformed inputs: in the third-level cache soon, even if it was cold
constexpr s64 kInputPanels = 2;          // of grad_weight, in the second-level cache

inline V load(const void* from) { return _mm256_load_si256(static_cast<const V*>(from)); }
inline void store(void* to, V v) { _mm256_store_si256(static_cast<V*>(to), v); }

inline V zero() { return _mm256_setzero_si256(); }
inline V add16(V a, V b) { return _mm256_add_epi16(a, b); }
inline V sub16(V a, V b) { return _mm256_sub_epi16(a, b); }
inline V shl16(V a, int n) { return _mm256_slli_epi16(a, n); }
inline V mul16(V a, s16 n) { return _mm256_mullo_epi16(a, _mm256_set1_epi16(n)); }
inline V add32(V a, V b) { return _mm256_add_epi32(a, b); }
inline V sub32(V a, V b) { return _mm256_sub_epi32(a, b); }
inline V shl32(V a, int n) { return _mm256_slli_epi32(a, n); }
inline V sar32(V a, int n) { return _mm256_srai_epi32(a, n); }
inline V mul32(V a, s32 n) { return _mm256_mullo_epi32(a, _mm256_set1_epi32(n)); }

inline Floats load_floats(const f32* from) { return _mm256_load_ps(from); }
inline Floats scale(V v, Floats factor) { return _mm256_mul_ps(_mm256_cvtepi32_ps(v), factor); }
inline void stream_floats(f32* to, Floats v) { _mm256_stream_ps(to, v); }

// The first `count` floats; none where count <= 0.
inline void store_floats(f32* to, Floats v, s64 count) {
    if (count >= 8) return _mm256_storeu_ps(to, v);
    if (count <= 0) return;
    const V lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_maskstore_ps(to, _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane), v);
}

inline void store_channels(void* to, V v) { store(to, v); }

inline V widen(__m128i bytes) { return _mm256_cvtepi8_epi16(bytes); }

struct LoadWhole {
    __m128i operator()(const s8* p) const { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
};

// The last channels of a pixel, fewer than 16, the rest zero. Nothing past them is read: where the pixel has 16 channels the
// load ends with the last one, else two loads of 8, 4, 2 or 1 bytes overlap; a shuffle puts the bytes in place.
class LoadTail {
public:
    LoadTail(s64 channels, s64 count) : back_(channels >= 16 ? 16 - count : 0), piece_(8) {
        while (piece_ > count) piece_ /= 2;
        second_ = count - piece_;
        alignas(16) s8 index[16];
        for (s64 i = 0; i < 16; ++i) index[i] = static_cast<s8>(back_ ? i + back_ : i < piece_ ? i : i - second_ + 8);
        for (s64 i = count; i < 16; ++i) index[i] = -1;
        index_ = _mm_load_si128(reinterpret_cast<const __m128i*>(index));
    }
    __m128i operator()(const s8* p) const {
        const __m128i bytes = back_ ? LoadWhole()(p - back_) : _mm_set_epi64x(read(p + second_), read(p));
        return _mm_shuffle_epi8(bytes, index_);
    }

private:
    s64 read(const s8* p) const {
        s64 bytes = 0;
        switch (piece_) {
            case 8: std::memcpy(&bytes, p, 8); break;
            case 4: std::memcpy(&bytes, p, 4); break;
            case 2: std::memcpy(&bytes, p, 2); break;
            default: std::memcpy(&bytes, p, 1);
        }
        return bytes;
    }

    s64 back_, piece_, second_;
    __m128i index_;
};

// body(c, load) for each panel of 16 channels, the last one perhaps with a LoadTail.
template <class Body>
inline void for_panels(s64 begin, s64 end, s64 channels, const Body& body) {
    s64 c = begin;
    for (; c + 16 <= end; c += 16) body(c, LoadWhole());
    if (c < end) body(c, LoadTail(channels, end - c));
}

// The same for each vector of channels.
template <class Body>
inline void for_vectors(s64 begin, s64 end, s64 channels, const Body& body) {
    for_panels(begin, end, channels, body);
}

// With channels 4-7 and 8-11 swapped a vector of int16 becomes one that unpacklo and unpackhi interleave in order.
inline V widen_to_pair(__m128i bytes) { return _mm256_cvtepi8_epi16(_mm_shuffle_epi32(bytes, 0xD8)); }

// 16 channels of two tiles, so widened, as [channel][2].
inline void store_pair(s16* to, V even, V odd) {
    store(to, _mm256_unpacklo_epi16(even, odd));
    store(to + kPanel, _mm256_unpackhi_epi16(even, odd));
}

// Two tiles of 16 channels as pairs: [position][channel][2], `stride` values from position to position.
template <class Transform, class Even, class Odd>
__attribute__((always_inline)) inline void transform_pair(const Even& even, const Odd& odd, s16* to, s64 stride) {
    V first[kPositions];
    transform_tile<Transform>([&](int i) { return widen_to_pair(even(i)); }, [&](int position, V v) { first[position] = v; });
    transform_tile<Transform>([&](int i) { return widen_to_pair(odd(i)); },
                              [&](int position, V v) { store_pair(to + position * stride, first[position], v); });
}

}  // namespace
}  // namespace byteback
