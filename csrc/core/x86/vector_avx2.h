// SPDX-License-Identifier: Apache-2.0
// The vectors of the AVX2 path: eight floats, eight 32-bit integers, and four float64 (two make a Wide).
//
// The drivers (elementwise/vector, block/vector) are written with the names below and know no instruction
// set. Another path is another header with these names, kLanes being a multiple of 8. Floats and Doubles also have the
// operators + - * /, which round once each. What a driver may rely on is said here, once:
//
//   smaller, larger    the second operand where one is NaN
//   fused              a * b + c with one rounding: only where a * b is exact, so that the reference rounds there too
//   to_ints            to nearest, half to even; what lies below all integers becomes the lowest one. to_ints_below: down
//   noise_floats       of noise as spread_pairs and upper_halves leave it; times kNoiseUnit it is u, and both are exact
//   kept, dropped      v or +0, by a mask
//   AllLanes           a whole vector        FirstLanes   the first few: the others read and write nothing, and hold 0
//   AllOfBlock, FirstOfBlock  the same for four vectors of floats that become bytes
//   BYTEBACK_NARROWER  the path to which a driver whose lanes are channels leaves few of them (is_narrow), if there is one
//
// In an anonymous namespace: each file compiles its own copy, or the linker could hand AVX2 code to a machine without it.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "core/types.h"

#define BYTEBACK_PATH avx2
#define BYTEBACK_INLINE inline __attribute__((always_inline))

namespace byteback {
namespace {

using Floats = __m256;
using Ints = __m256i;
using Doubles = __m256d;
using Mask = __m256;    // all bits of a lane, or none
using BlockBits = u32;  // a bit for each element of four vectors

constexpr int kLanes = 8;
constexpr int kBlock = 4 * kLanes;

// ---- constants and memory --------------------------------------------------------------------------------------------

BYTEBACK_INLINE Floats all(f32 value) { return _mm256_set1_ps(value); }
BYTEBACK_INLINE Doubles all64(f64 value) { return _mm256_set1_pd(value); }
BYTEBACK_INLINE Ints all32(u32 value) { return _mm256_set1_epi32(static_cast<s32>(value)); }

BYTEBACK_INLINE Floats load(const f32* p) { return _mm256_loadu_ps(p); }
BYTEBACK_INLINE Doubles load(const f64* p) { return _mm256_loadu_pd(p); }
BYTEBACK_INLINE Ints load(const void* p) { return _mm256_loadu_si256(static_cast<const Ints*>(p)); }
BYTEBACK_INLINE void store(f32* p, Floats v) { _mm256_storeu_ps(p, v); }
BYTEBACK_INLINE void store(f64* p, Doubles v) { _mm256_storeu_pd(p, v); }
BYTEBACK_INLINE void store(void* p, Ints v) { _mm256_storeu_si256(static_cast<Ints*>(p), v); }
BYTEBACK_INLINE void end_streams() { _mm_sfence(); }  // behind what was written past the caches

// ---- integers --------------------------------------------------------------------------------------------------------

BYTEBACK_INLINE Ints add32(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
BYTEBACK_INLINE Ints sub32(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
BYTEBACK_INLINE Ints mul32(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
BYTEBACK_INLINE Ints max32(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
BYTEBACK_INLINE Ints and32(Ints a, Ints b) { return _mm256_and_si256(a, b); }
BYTEBACK_INLINE Ints or32(Ints a, Ints b) { return _mm256_or_si256(a, b); }
BYTEBACK_INLINE Ints xor32(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
BYTEBACK_INLINE Ints shl32(Ints a, int n) { return _mm256_slli_epi32(a, n); }
BYTEBACK_INLINE Ints shl32(Ints a, Ints n) { return _mm256_sllv_epi32(a, n); }
BYTEBACK_INLINE Ints shr32(Ints a, int n) { return _mm256_srli_epi32(a, n); }
BYTEBACK_INLINE bool any_greater(Ints a, Ints b) {
    return !_mm256_testz_si256(_mm256_cmpgt_epi32(a, b), _mm256_set1_epi32(-1));
}
BYTEBACK_INLINE bool any_negative_byte(Ints a) { return _mm256_movemask_epi8(a) != 0; }

// ---- floats ----------------------------------------------------------------------------------------------------------

BYTEBACK_INLINE Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
BYTEBACK_INLINE Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
BYTEBACK_INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
BYTEBACK_INLINE Doubles fused(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
BYTEBACK_INLINE Floats round_even(Floats v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
BYTEBACK_INLINE Doubles round_down(Doubles v) { return _mm256_floor_pd(v); }
BYTEBACK_INLINE Ints to_ints(Floats v) { return _mm256_cvtps_epi32(v); }
BYTEBACK_INLINE Ints to_ints_below(Floats v) { return _mm256_cvtps_epi32(_mm256_floor_ps(v)); }
BYTEBACK_INLINE Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
BYTEBACK_INLINE Ints bits_of(Floats v) { return _mm256_castps_si256(v); }
BYTEBACK_INLINE Floats floats_of(Ints bits) { return _mm256_castsi256_ps(bits); }

// |v| as bits, compared as integers: in that order NaN lies above Inf.
BYTEBACK_INLINE Ints magnitude(Floats v) { return and32(bits_of(v), all32(0x7FFFFFFF)); }
BYTEBACK_INLINE Floats absolute(Floats v) { return floats_of(magnitude(v)); }
BYTEBACK_INLINE Floats negated(Floats v) { return _mm256_xor_ps(v, all(-0.0f)); }

// ---- masks: comparisons with NaN are false, except is_nan --------------------------------------------------------------

BYTEBACK_INLINE Mask greater(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
BYTEBACK_INLINE Mask less(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
BYTEBACK_INLINE Mask at_most(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_LE_OQ); }
BYTEBACK_INLINE Mask differ(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_NEQ_OQ); }
BYTEBACK_INLINE Mask is_nan(Floats v) { return _mm256_cmp_ps(v, v, _CMP_UNORD_Q); }
BYTEBACK_INLINE Mask is_nan(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_UNORD_Q); }  // either
BYTEBACK_INLINE Mask is_number(Floats v) { return _mm256_cmp_ps(v, v, _CMP_ORD_Q); }
BYTEBACK_INLINE Mask greater(Ints a, Ints b) { return floats_of(_mm256_cmpgt_epi32(a, b)); }
BYTEBACK_INLINE Mask every_lane() { return floats_of(_mm256_set1_epi32(-1)); }
BYTEBACK_INLINE Mask no_lane() { return _mm256_setzero_ps(); }
BYTEBACK_INLINE Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
BYTEBACK_INLINE Mask either(Mask a, Mask b) { return _mm256_or_ps(a, b); }
BYTEBACK_INLINE BlockBits lane_bits(Mask mask) { return static_cast<BlockBits>(_mm256_movemask_ps(mask)); }
BYTEBACK_INLINE bool any(Mask mask) { return _mm256_movemask_ps(mask) != 0; }

BYTEBACK_INLINE Floats kept(Mask mask, Floats v) { return _mm256_and_ps(v, mask); }
BYTEBACK_INLINE Floats dropped(Mask mask, Floats v) { return _mm256_andnot_ps(mask, v); }
BYTEBACK_INLINE Floats chosen(Mask mask, Floats v, Floats otherwise) { return _mm256_blendv_ps(otherwise, v, mask); }
BYTEBACK_INLINE Ints chosen(Mask mask, Ints v, Ints otherwise) { return _mm256_blendv_epi8(otherwise, v, bits_of(mask)); }
// count + 1 in the lanes of the mask.
BYTEBACK_INLINE Ints counted(Ints count, Mask mask) { return sub32(count, bits_of(mask)); }

// ---- float64: the lanes of a Floats in two halves ----------------------------------------------------------------------

struct Wide {
    Doubles low, high;
};

BYTEBACK_INLINE Wide widen(Floats x) {
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
}

// ---- the noise of neighbouring elements, two of which share a hash --------------------------------------------------------

// kLanes hashes in pair_order become 2 kLanes elements in order: h16 in the upper half of each lane, 0x8000 in the lower.
// Interleaving works within 128 bits, hence the order.
BYTEBACK_INLINE Ints pair_order() { return _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7); }
BYTEBACK_INLINE void spread_pairs(Ints hashes, Ints& first, Ints& second) {
    const Ints half = _mm256_set1_epi16(static_cast<s16>(0x8000));
    first = _mm256_unpacklo_epi16(half, hashes);
    second = _mm256_unpackhi_epi16(half, hashes);
}
// The same of hashes whose upper half is the element's.
BYTEBACK_INLINE Ints upper_halves(Ints hashes) { return _mm256_blend_epi16(hashes, all32(0x8000), 0x55); }

// Halved, as AVX2 only converts signed integers.
constexpr f32 kNoiseUnit = 1.0f / 2147483648.0f;
BYTEBACK_INLINE Floats noise_floats(Ints noise) { return to_floats(shr32(noise, 1)); }

// ---- bytes and 16-bit words --------------------------------------------------------------------------------------------

// Integers up to 127 as bytes of at least -127.
BYTEBACK_INLINE __m128i packed(Ints v) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return _mm_max_epi8(_mm_packs_epi16(words, words), _mm_set1_epi8(-127));
}

// Integers from 0 to 255.
BYTEBACK_INLINE __m128i packed_unsigned(Ints v) {
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return _mm_packus_epi16(words, words);
}

// Packing works within 128-bit halves, so the second step puts the words right.
BYTEBACK_INLINE __m256i packed(const Ints (&v)[4]) {
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    const __m256i ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    return _mm256_max_epi8(ordered, _mm256_set1_epi8(-127));
}

// ---- lanes -----------------------------------------------------------------------------------------------------------

struct AllLanes {
    BYTEBACK_INLINE Floats load(const f32* p) const { return _mm256_loadu_ps(p); }
    // x, which is at p. Converting from memory spares the shuffle of the upper half.
    BYTEBACK_INLINE Wide wide(const f32* p, Floats) const {
        return {_mm256_cvtps_pd(_mm_loadu_ps(p)), _mm256_cvtps_pd(_mm_loadu_ps(p + 4))};
    }
    BYTEBACK_INLINE Wide wide(const s8* p) const { return {four(p), four(p + 4)}; }
    BYTEBACK_INLINE Ints ints(const u16* p) const {
        return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    BYTEBACK_INLINE Ints ints(const s8* p) const {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    // The lanes whose bit is set.
    BYTEBACK_INLINE Mask mask(const u8* p) const {
        const Ints bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        return floats_of(_mm256_cmpeq_epi32(and32(_mm256_set1_epi8(static_cast<char>(*p)), bits), bits));
    }
    static constexpr s64 mask_bytes() { return 1; }
    // Past the caches if `stream` says so: only where p is aligned to a vector.
    BYTEBACK_INLINE void store(f32* p, Floats v, bool stream = false) const {
        if (stream)
            _mm256_stream_ps(p, v);
        else
            _mm256_storeu_ps(p, v);
    }
    BYTEBACK_INLINE void store_words(u16* p, Ints v, bool stream = false) const {
        const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        if (stream)
            _mm_stream_si128(reinterpret_cast<__m128i*>(p), words);
        else
            _mm_storeu_si128(reinterpret_cast<__m128i*>(p), words);
    }
    // Integers up to 127 as bytes of at least -127.
    BYTEBACK_INLINE void store_bytes(s8* p, const Ints (&v)[1], bool = false) const {
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p), packed(v[0]));
    }
    BYTEBACK_INLINE void store_bytes(s8* p, const Ints (&v)[4], bool stream = false) const {
        if (stream)
            _mm256_stream_si256(reinterpret_cast<__m256i*>(p), packed(v));
        else
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed(v));
    }
    // Integers from 0 to 255.
    BYTEBACK_INLINE void store_bytes(u8* p, const Ints (&v)[1]) const {
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p), packed_unsigned(v[0]));
    }
    BYTEBACK_INLINE void store_bytes(u8* p, const Ints (&v)[4]) const {
        const __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(v[0], v[1]), _mm256_packus_epi32(v[2], v[3]));
        byteback::store(p, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    }
    BYTEBACK_INLINE Floats only(Floats v) const { return v; }
    BYTEBACK_INLINE Ints only(Ints v) const { return v; }

private:
    static BYTEBACK_INLINE Doubles four(const s8* p) { return _mm256_cvtepi32_pd(_mm_cvtepi8_epi32(_mm_loadu_si32(p))); }
};

// n <= 8 bytes, the others 0; reads nothing behind them.
inline s64 first_bytes(const s8* p, s64 n) {
    u64 all = 0, part = 0;
    if (n == 8) std::memcpy(&all, p, 8);
    if (n & 4) std::memcpy(&all, p, 4);
    if (n & 2) std::memcpy(&part, p + (n & 4), 2), all |= part << 8 * (n & 4);
    if (n & 1) all |= static_cast<u64>(static_cast<u8>(p[n & 6])) << 8 * (n & 6);
    return static_cast<s64>(all);
}

struct FirstLanes {
    s64 count;
    __m256i lanes;

    explicit FirstLanes(s64 n)
        : count(n < kLanes ? n : kLanes),
          lanes(_mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<s32>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))) {}

    Floats load(const f32* p) const { return _mm256_maskload_ps(p, lanes); }
    Wide wide(const f32*, Floats x) const { return widen(x); }
    Wide wide(const s8* p) const {
        const __m128i bytes = _mm_cvtsi64_si128(first_bytes(p, count));
        return {_mm256_cvtepi32_pd(_mm_cvtepi8_epi32(bytes)), _mm256_cvtepi32_pd(_mm_cvtepi8_epi32(_mm_srli_si128(bytes, 4)))};
    }
    Ints ints(const u16* p) const {
        __m128i words = _mm_setzero_si128();
        std::memcpy(&words, p, static_cast<size_t>(count * 2));
        return _mm256_cvtepu16_epi32(words);
    }
    Ints ints(const s8* p) const { return _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(first_bytes(p, count))); }
    Mask mask(const u8* p) const { return AllLanes().mask(p); }
    static constexpr s64 mask_bytes() { return 1; }
    void store(f32* p, Floats v, bool = false) const { _mm256_maskstore_ps(p, lanes, v); }
    void store(s32* p, Ints v) const { _mm256_maskstore_epi32(p, lanes, v); }
    void store_words(u16* p, Ints v, bool = false) const {
        const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        std::memcpy(p, &words, static_cast<size_t>(count * 2));
    }
    void store_bytes(s8* p, const Ints (&v)[1], bool = false) const {
        const __m128i bytes = packed(v[0]);
        std::memcpy(p, &bytes, static_cast<size_t>(count));
    }
    void store_bytes(u8* p, const Ints (&v)[1]) const {
        const __m128i bytes = packed_unsigned(v[0]);
        std::memcpy(p, &bytes, static_cast<size_t>(count));
    }
    Floats only(Floats v) const { return _mm256_and_ps(v, floats_of(lanes)); }
    Ints only(Ints v) const { return and32(v, lanes); }
};

struct AllOfBlock {
    BYTEBACK_INLINE Floats load(const f32* p, int v) const { return _mm256_loadu_ps(p + kLanes * v); }
    BYTEBACK_INLINE void store_bytes(s8* p, const Ints (&v)[4]) const { AllLanes().store_bytes(p, v); }
};

struct FirstOfBlock {
    s64 count;

    Floats load(const f32* p, int v) const {
        const s64 left = count - kLanes * v;
        return left > 0 ? FirstLanes(left).load(p + kLanes * v) : _mm256_setzero_ps();
    }
    void store_bytes(s8* p, const Ints (&v)[4]) const {
        const __m256i bytes = packed(v);
        std::memcpy(p, &bytes, static_cast<size_t>(count));
    }
};

}  // namespace
}  // namespace byteback
