// SPDX-License-Identifier: Apache-2.0
// The vectors of the AVX-512 path: sixteen floats, sixteen 32-bit integers, and eight float64 (two make a Wide).
//
// The names and what drivers may rely on are those of vector_avx2.h. What differs: a mask is a bit for each lane, so that the
// first few lanes of a vector are read and written by one instruction, and a conversion can round down by itself.
//
// In an anonymous namespace: each file compiles its own copy, or the linker could hand this code to a machine without AVX-512.
#pragma once

// gcc 12's header makes its "undefined" vectors in a way that gcc 12 warns of.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstring>

#include "core/types.h"

#define BYTEBACK_PATH avx512vnni
#define BYTEBACK_NARROWER avx2
#define BYTEBACK_INLINE inline __attribute__((always_inline))

namespace byteback {
namespace {

using Floats = __m512;
using Ints = __m512i;
using Doubles = __m512d;
using Mask = __mmask16;
using BlockBits = u64;  // a bit for each element of four vectors

constexpr int kLanes = 16;
constexpr int kBlock = 4 * kLanes;

// Where lanes are channels, and half of the last of few vectors or more is empty, narrower vectors take less time.
BYTEBACK_INLINE bool is_narrow(s64 channels) {
    return channels < 5 * kLanes && channels % kLanes != 0 && channels % kLanes <= kLanes / 2;
}

// ---- constants and memory --------------------------------------------------------------------------------------------

BYTEBACK_INLINE Floats all(f32 value) { return _mm512_set1_ps(value); }
BYTEBACK_INLINE Doubles all64(f64 value) { return _mm512_set1_pd(value); }
BYTEBACK_INLINE Ints all32(u32 value) { return _mm512_set1_epi32(static_cast<s32>(value)); }

BYTEBACK_INLINE Floats load(const f32* p) { return _mm512_loadu_ps(p); }
BYTEBACK_INLINE Doubles load(const f64* p) { return _mm512_loadu_pd(p); }
BYTEBACK_INLINE Ints load(const void* p) { return _mm512_loadu_si512(p); }
BYTEBACK_INLINE void store(f32* p, Floats v) { _mm512_storeu_ps(p, v); }
BYTEBACK_INLINE void store(f64* p, Doubles v) { _mm512_storeu_pd(p, v); }
BYTEBACK_INLINE void store(void* p, Ints v) { _mm512_storeu_si512(p, v); }
BYTEBACK_INLINE void end_streams() { _mm_sfence(); }  // behind what was written past the caches

// ---- integers --------------------------------------------------------------------------------------------------------

BYTEBACK_INLINE Ints add32(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
BYTEBACK_INLINE Ints sub32(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
BYTEBACK_INLINE Ints mul32(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
BYTEBACK_INLINE Ints max32(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
BYTEBACK_INLINE Ints and32(Ints a, Ints b) { return _mm512_and_si512(a, b); }
BYTEBACK_INLINE Ints or32(Ints a, Ints b) { return _mm512_or_si512(a, b); }
BYTEBACK_INLINE Ints xor32(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
BYTEBACK_INLINE Ints shl32(Ints a, int n) { return _mm512_slli_epi32(a, static_cast<unsigned>(n)); }
BYTEBACK_INLINE Ints shl32(Ints a, Ints n) { return _mm512_sllv_epi32(a, n); }
BYTEBACK_INLINE Ints shr32(Ints a, int n) { return _mm512_srli_epi32(a, static_cast<unsigned>(n)); }
BYTEBACK_INLINE bool any_greater(Ints a, Ints b) { return _mm512_cmpgt_epi32_mask(a, b) != 0; }
BYTEBACK_INLINE bool any_negative_byte(Ints a) { return _mm512_movepi8_mask(a) != 0; }

// ---- floats ----------------------------------------------------------------------------------------------------------

BYTEBACK_INLINE Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
BYTEBACK_INLINE Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
BYTEBACK_INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
BYTEBACK_INLINE Doubles fused(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
BYTEBACK_INLINE Floats round_even(Floats v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
BYTEBACK_INLINE Doubles round_down(Doubles v) { return _mm512_roundscale_pd(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
BYTEBACK_INLINE Ints to_ints(Floats v) { return _mm512_cvtps_epi32(v); }
BYTEBACK_INLINE Ints to_ints_below(Floats v) { return _mm512_cvt_roundps_epi32(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
BYTEBACK_INLINE Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
BYTEBACK_INLINE Ints bits_of(Floats v) { return _mm512_castps_si512(v); }
BYTEBACK_INLINE Floats floats_of(Ints bits) { return _mm512_castsi512_ps(bits); }

BYTEBACK_INLINE Ints magnitude(Floats v) { return and32(bits_of(v), all32(0x7FFFFFFF)); }
BYTEBACK_INLINE Floats absolute(Floats v) { return floats_of(magnitude(v)); }
BYTEBACK_INLINE Floats negated(Floats v) { return floats_of(xor32(bits_of(v), all32(0x80000000u))); }

// ---- masks: comparisons with NaN are false, except is_nan --------------------------------------------------------------

BYTEBACK_INLINE Mask greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
BYTEBACK_INLINE Mask less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
BYTEBACK_INLINE Mask at_most(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
BYTEBACK_INLINE Mask differ(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_OQ); }
BYTEBACK_INLINE Mask is_nan(Floats v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); }
BYTEBACK_INLINE Mask is_nan(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }  // either
BYTEBACK_INLINE Mask is_number(Floats v) { return _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q); }
BYTEBACK_INLINE Mask greater(Ints a, Ints b) { return _mm512_cmpgt_epi32_mask(a, b); }
BYTEBACK_INLINE Mask every_lane() { return 0xFFFF; }
BYTEBACK_INLINE Mask no_lane() { return 0; }
BYTEBACK_INLINE Mask both(Mask a, Mask b) { return _kand_mask16(a, b); }
BYTEBACK_INLINE Mask either(Mask a, Mask b) { return _kor_mask16(a, b); }
BYTEBACK_INLINE BlockBits lane_bits(Mask mask) { return mask; }
BYTEBACK_INLINE bool any(Mask mask) { return mask != 0; }

BYTEBACK_INLINE Floats kept(Mask mask, Floats v) { return _mm512_maskz_mov_ps(mask, v); }
BYTEBACK_INLINE Floats dropped(Mask mask, Floats v) { return _mm512_maskz_mov_ps(_knot_mask16(mask), v); }
BYTEBACK_INLINE Floats chosen(Mask mask, Floats v, Floats otherwise) { return _mm512_mask_mov_ps(otherwise, mask, v); }
BYTEBACK_INLINE Ints chosen(Mask mask, Ints v, Ints otherwise) { return _mm512_mask_mov_epi32(otherwise, mask, v); }
// count + 1 in the lanes of the mask.
BYTEBACK_INLINE Ints counted(Ints count, Mask mask) { return _mm512_mask_sub_epi32(count, mask, count, _mm512_set1_epi32(-1)); }

// ---- float64: the lanes of a Floats in two halves ----------------------------------------------------------------------

struct Wide {
    Doubles low, high;
};

BYTEBACK_INLINE Wide widen(Floats x) {
    return {_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))};
}

// ---- the noise of neighbouring elements, two of which share a hash --------------------------------------------------------

BYTEBACK_INLINE Ints pair_order() { return _mm512_setr_epi32(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15); }
BYTEBACK_INLINE void spread_pairs(Ints hashes, Ints& first, Ints& second) {
    const Ints half = _mm512_set1_epi16(static_cast<s16>(0x8000));
    first = _mm512_unpacklo_epi16(half, hashes);
    second = _mm512_unpackhi_epi16(half, hashes);
}
BYTEBACK_INLINE Ints upper_halves(Ints hashes) { return or32(and32(hashes, all32(0xFFFF0000u)), all32(0x8000)); }

constexpr f32 kNoiseUnit = 1.0f / 4294967296.0f;
BYTEBACK_INLINE Floats noise_floats(Ints noise) { return _mm512_cvtepu32_ps(noise); }

// ---- bytes and 16-bit words --------------------------------------------------------------------------------------------

// Integers up to 127 as bytes of at least -127.
BYTEBACK_INLINE __m128i packed(Ints v) { return _mm_max_epi8(_mm512_cvtsepi32_epi8(v), _mm_set1_epi8(-127)); }

// Packing works within 128 bits, so a last step puts the words of 4 bytes right.
BYTEBACK_INLINE __m512i in_order(__m512i bytes) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
}
BYTEBACK_INLINE __m512i packed(const Ints (&v)[4]) {
    const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
    return _mm512_max_epi8(in_order(bytes), _mm512_set1_epi8(-127));
}

// ---- lanes -----------------------------------------------------------------------------------------------------------

struct AllLanes {
    BYTEBACK_INLINE Floats load(const f32* p) const { return _mm512_loadu_ps(p); }
    // x, which is at p. Converting from memory spares the shuffle of the upper half.
    BYTEBACK_INLINE Wide wide(const f32* p, Floats) const {
        return {_mm512_cvtps_pd(_mm256_loadu_ps(p)), _mm512_cvtps_pd(_mm256_loadu_ps(p + 8))};
    }
    BYTEBACK_INLINE Wide wide(const s8* p) const { return {eight(p), eight(p + 8)}; }
    BYTEBACK_INLINE Ints ints(const u16* p) const {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    BYTEBACK_INLINE Ints ints(const s8* p) const {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    // The lanes whose bit is set.
    BYTEBACK_INLINE Mask mask(const u8* p) const {
        u16 bits;
        std::memcpy(&bits, p, sizeof(bits));
        return bits;
    }
    static constexpr s64 mask_bytes() { return 2; }
    // Past the caches if `stream` says so: only where p is aligned to a vector.
    BYTEBACK_INLINE void store(f32* p, Floats v, bool stream = false) const {
        if (stream)
            _mm512_stream_ps(p, v);
        else
            _mm512_storeu_ps(p, v);
    }
    BYTEBACK_INLINE void store_words(u16* p, Ints v, bool stream = false) const {
        const __m256i words = _mm512_cvtepi32_epi16(v);
        if (stream)
            _mm256_stream_si256(reinterpret_cast<__m256i*>(p), words);
        else
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
    }
    // Integers up to 127 as bytes of at least -127.
    BYTEBACK_INLINE void store_bytes(s8* p, const Ints (&v)[1], bool = false) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed(v[0]));
    }
    BYTEBACK_INLINE void store_bytes(s8* p, const Ints (&v)[4], bool stream = false) const {
        if (stream)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(p), packed(v));
        else
            _mm512_storeu_si512(p, packed(v));
    }
    // Integers from 0 to 255.
    BYTEBACK_INLINE void store_bytes(u8* p, const Ints (&v)[1]) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v[0]));
    }
    BYTEBACK_INLINE void store_bytes(u8* p, const Ints (&v)[4]) const {
        byteback::store(p, in_order(_mm512_packus_epi16(_mm512_packus_epi32(v[0], v[1]), _mm512_packus_epi32(v[2], v[3]))));
    }
    BYTEBACK_INLINE Floats only(Floats v) const { return v; }
    BYTEBACK_INLINE Ints only(Ints v) const { return v; }
    BYTEBACK_INLINE Mask only(Mask mask) const { return mask; }

private:
    static BYTEBACK_INLINE Doubles eight(const s8* p) {
        return _mm512_cvtepi32_pd(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
    }
};

struct FirstLanes {
    s64 count;
    Mask lanes;

    explicit FirstLanes(s64 n) : count(n < kLanes ? n : kLanes), lanes(static_cast<Mask>((1u << count) - 1)) {}

    Floats load(const f32* p) const { return _mm512_maskz_loadu_ps(lanes, p); }
    Wide wide(const f32*, Floats x) const { return widen(x); }
    Wide wide(const s8* p) const {
        const Ints v = ints(p);
        return {_mm512_cvtepi32_pd(_mm512_castsi512_si256(v)), _mm512_cvtepi32_pd(_mm512_extracti32x8_epi32(v, 1))};
    }
    Ints ints(const u16* p) const { return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, p)); }
    Ints ints(const s8* p) const { return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, p)); }
    Mask mask(const u8* p) const { return count > 8 ? AllLanes().mask(p) : Mask{*p}; }
    s64 mask_bytes() const { return count > 8 ? 2 : 1; }
    void store(f32* p, Floats v, bool = false) const { _mm512_mask_storeu_ps(p, lanes, v); }
    void store(s32* p, Ints v) const { _mm512_mask_storeu_epi32(p, lanes, v); }
    void store_words(u16* p, Ints v, bool = false) const { _mm256_mask_storeu_epi16(p, lanes, _mm512_cvtepi32_epi16(v)); }
    void store_bytes(s8* p, const Ints (&v)[1], bool = false) const { _mm_mask_storeu_epi8(p, lanes, packed(v[0])); }
    void store_bytes(u8* p, const Ints (&v)[1]) const { _mm_mask_storeu_epi8(p, lanes, _mm512_cvtepi32_epi8(v[0])); }
    Floats only(Floats v) const { return _mm512_maskz_mov_ps(lanes, v); }
    Ints only(Ints v) const { return _mm512_maskz_mov_epi32(lanes, v); }
    Mask only(Mask mask) const { return both(mask, lanes); }
};

struct AllOfBlock {
    BYTEBACK_INLINE Floats load(const f32* p, int v) const { return _mm512_loadu_ps(p + kLanes * v); }
    BYTEBACK_INLINE void store_bytes(s8* p, const Ints (&v)[4]) const { AllLanes().store_bytes(p, v); }
};

struct FirstOfBlock {
    __mmask64 lanes;

    explicit FirstOfBlock(s64 count) : lanes((__mmask64{1} << count) - 1) {}  // count < kBlock
    Floats load(const f32* p, int v) const {
        return _mm512_maskz_loadu_ps(static_cast<Mask>(lanes >> kLanes * v), p + kLanes * v);
    }
    void store_bytes(s8* p, const Ints (&v)[4]) const { _mm512_mask_storeu_epi8(p, lanes, packed(v)); }
};

}  // namespace
}  // namespace byteback
