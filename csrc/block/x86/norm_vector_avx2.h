// SPDX-License-Identifier: Apache-2.0
// Eight elements of the fused block's passes (norm.h): lanes, activations, gates, int8, and how x was kept.
//
// In an anonymous namespace, as everything that is compiled for AVX2. Only for norm_*avx2.cpp.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <limits>
#include <vector>

#include "block/norm.h"
#include "elementwise/rows.h"

#define BYTEBACK_INLINE inline __attribute__((always_inline))

namespace byteback::avx2 {

namespace {

// ---- lanes: whole vectors, or the first few of one -------------------------------------------------------------------

// Eight floats as float64.
struct Wide {
    __m256d low, high;
};

BYTEBACK_INLINE Wide widen(__m256 x) {
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
}

struct AllLanes {
    BYTEBACK_INLINE __m256 load(const f32* p) const { return _mm256_loadu_ps(p); }
    // Converts from memory, which spares the shuffle of the upper half.
    BYTEBACK_INLINE Wide wide(const f32* p, __m256) const {
        return {_mm256_cvtps_pd(_mm_loadu_ps(p)), _mm256_cvtps_pd(_mm_loadu_ps(p + 4))};
    }
    BYTEBACK_INLINE __m128i words(const u16* p) const { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
    BYTEBACK_INLINE __m128i bytes(const s8* p) const { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
    BYTEBACK_INLINE void store(f32* p, __m256 v) const { _mm256_storeu_ps(p, v); }
    BYTEBACK_INLINE void store_words(u16* p, __m128i v) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v); }
    BYTEBACK_INLINE void store_bytes(s8* p, __m128i v) const { _mm_storel_epi64(reinterpret_cast<__m128i*>(p), v); }
    BYTEBACK_INLINE __m256 only(__m256 v) const { return v; }
};

// Lanes that are off read and write nothing and hold 0.
struct FirstLanes {
    s64 count;
    __m256i mask;

    explicit FirstLanes(s64 n)
        : count(n),
          mask(_mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<s32>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))) {}

    __m256 load(const f32* p) const { return _mm256_maskload_ps(p, mask); }
    Wide wide(const f32*, __m256 x) const { return widen(x); }
    __m128i words(const u16* p) const { return some(p, count * 2); }
    __m128i bytes(const s8* p) const { return some(p, count); }
    void store(f32* p, __m256 v) const { _mm256_maskstore_ps(p, mask, v); }
    void store_words(u16* p, __m128i v) const { std::memcpy(p, &v, count * 2); }
    void store_bytes(s8* p, __m128i v) const { std::memcpy(p, &v, count); }
    __m256 only(__m256 v) const { return _mm256_and_ps(v, _mm256_castsi256_ps(mask)); }

private:
    static __m128i some(const void* p, s64 n) {
        __m128i v = _mm_setzero_si128();
        std::memcpy(&v, p, n);
        return v;
    }
};

// Past the caches if `stream` says so: only for floats that are aligned to a vector.
BYTEBACK_INLINE void put(f32* to, __m256 v, bool stream, AllLanes lanes) {
    if (stream)
        _mm256_stream_ps(to, v);
    else
        lanes.store(to, v);
}
BYTEBACK_INLINE void put(f32* to, __m256 v, bool, FirstLanes lanes) { lanes.store(to, v); }

// Whether a float result is so large that no cache would hold it until it is read again; `whole` floats are written together.
inline bool should_stream(const f32* to, s64 rows, s64 channels, s64 whole) {
    constexpr s64 kLarge = 24 << 20;
    const uintptr_t address = reinterpret_cast<uintptr_t>(to);
    return to && channels % whole == 0 && address % (whole * sizeof(f32)) == 0 &&
           rows * channels * static_cast<s64>(sizeof(f32)) > kLarge;
}

// The same for int8 results, of which `written` bytes are made and which are written in blocks of 32.
inline bool should_stream(const s8* to, s64 start, s64 written) {
    constexpr s64 kLarge = 12 << 20;
    return reinterpret_cast<uintptr_t>(to) % 32 == 0 && start % 32 == 0 && written > kLarge;
}

// ---- activations and gates -------------------------------------------------------------------------------------------

BYTEBACK_INLINE __m256 all(f32 value) { return _mm256_set1_ps(value); }

BYTEBACK_INLINE __m256 power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

// norm.h says how. max and min return their second operand if one is NaN, so a NaN stays one to the end.
BYTEBACK_INLINE __m256 exponential(__m256 t) {
    t = _mm256_min_ps(all(kExpHighest), _mm256_max_ps(all(kExpLowest), t));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(t, all(kLog2E)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 r = _mm256_sub_ps(_mm256_sub_ps(t, _mm256_mul_ps(n, all(kLn2High))), _mm256_mul_ps(n, all(kLn2Low)));
    const __m256 square = _mm256_mul_ps(r, r);
    const __m256 upper = _mm256_add_ps(_mm256_mul_ps(all(kExp5), r), all(kExp4));
    const __m256 lower = _mm256_add_ps(_mm256_mul_ps(all(kExp3), r), all(kExp2));
    const __m256 tail = _mm256_add_ps(_mm256_mul_ps(upper, square), lower);
    const __m256 sum = _mm256_add_ps(_mm256_add_ps(_mm256_mul_ps(tail, square), r), all(1.0f));
    return _mm256_mul_ps(sum, power_of_two(_mm256_cvtps_epi32(n)));
}

BYTEBACK_INLINE __m256 one_plus_exp_of_minus(__m256 z) {
    return _mm256_add_ps(all(1.0f), exponential(_mm256_xor_ps(z, all(-0.0f))));
}

// A NaN stays one; -0 becomes +0.
BYTEBACK_INLINE __m256 above_zero(__m256 z) { return _mm256_andnot_ps(_mm256_cmp_ps(z, _mm256_setzero_ps(), _CMP_LE_OQ), z); }
BYTEBACK_INLINE __m256 below_six(__m256 z) { return _mm256_min_ps(all(6.0f), z); }

template <Activation activation>
BYTEBACK_INLINE __m256 activate(__m256 z) {
    if constexpr (activation == Activation::relu) return above_zero(z);
    if constexpr (activation == Activation::relu6) return below_six(above_zero(z));
    if constexpr (activation == Activation::hardswish)
        return _mm256_div_ps(_mm256_mul_ps(z, below_six(above_zero(_mm256_add_ps(z, all(3.0f))))), all(6.0f));
    if constexpr (activation == Activation::silu) return _mm256_div_ps(z, one_plus_exp_of_minus(z));
    return z;
}

BYTEBACK_INLINE __m256 between_zero_and_six(__m256 z) {
    return _mm256_and_ps(_mm256_cmp_ps(z, _mm256_setzero_ps(), _CMP_GT_OQ), _mm256_cmp_ps(z, all(6.0f), _CMP_LT_OQ));
}

// All bits of the lanes whose gradient passes.
template <Activation activation>
BYTEBACK_INLINE __m256 passes(__m256 z) {
    if constexpr (activation == Activation::relu) return _mm256_cmp_ps(z, _mm256_setzero_ps(), _CMP_GT_OQ);
    if constexpr (activation == Activation::relu6) return between_zero_and_six(z);
    return _mm256_castsi256_ps(_mm256_set1_epi32(-1));
}

// The lanes whose bit of a mask's byte is set.
BYTEBACK_INLINE __m256 lanes_of(u8 byte) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i everywhere = _mm256_set1_epi8(static_cast<char>(byte));
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(everywhere, bits), bits));
}

template <Gate gate>
BYTEBACK_INLINE __m256 slope(__m256 z) {
    if constexpr (gate == Gate::hardswish) {
        const __m256 line = _mm256_add_ps(_mm256_div_ps(z, all(3.0f)), all(0.5f));
        const __m256 upper = _mm256_blendv_ps(all(1.0f), line, _mm256_cmp_ps(z, all(3.0f), _CMP_LE_OQ));
        return _mm256_andnot_ps(_mm256_cmp_ps(z, all(-3.0f), _CMP_LT_OQ), upper);
    }
    const __m256 s = _mm256_div_ps(all(1.0f), one_plus_exp_of_minus(z));
    return _mm256_mul_ps(s, _mm256_add_ps(all(1.0f), _mm256_mul_ps(z, _mm256_sub_ps(all(1.0f), s))));
}

// gm. `k` is where the channels' a and b lie, `m` the mask's byte.
template <Gate gate>
BYTEBACK_INLINE __m256 gated(__m256 g, __m256 x, const Backward& from, s64 k, s64 m) {
    if constexpr (gate == Gate::open) return g;
    if constexpr (gate == Gate::mask) return _mm256_and_ps(g, lanes_of(from.mask[m]));
    const __m256 z = _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(from.a + k), x), _mm256_loadu_ps(from.b + k));
    if constexpr (gate == Gate::relu) return _mm256_and_ps(g, passes<Activation::relu>(z));
    if constexpr (gate == Gate::relu6) return _mm256_and_ps(g, between_zero_and_six(z));
    return _mm256_mul_ps(g, slope<gate>(z));
}

// ---- how x was kept --------------------------------------------------------------------------------------------------

template <Stored stored, class Lanes>
BYTEBACK_INLINE __m256 kept_value(const Kept& x, s64 at, s64 k, Lanes lanes) {
    if constexpr (stored == Stored::f32) return lanes.load(static_cast<const f32*>(x.values) + at);
    if constexpr (stored == Stored::bf16) {
        const __m256i words = _mm256_cvtepu16_epi32(lanes.words(static_cast<const u16*>(x.values) + at));
        return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    }
    const __m256 q = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(lanes.bytes(static_cast<const s8*>(x.values) + at)));
    return _mm256_add_ps(_mm256_mul_ps(q, _mm256_loadu_ps(x.step + k)), _mm256_loadu_ps(x.centre + k));
}

// Eight int32 up to 127 as eight bytes of at least -127.
BYTEBACK_INLINE __m128i packed(const __m256i (&v)[1]) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v[0]), _mm256_extracti128_si256(v[0], 1));
    return _mm_max_epi8(_mm_packs_epi16(words, words), _mm_set1_epi8(-127));
}

// Four vectors as 32 bytes in order. Packing works within 128-bit halves, so the last step puts the words right.
BYTEBACK_INLINE __m256i packed(const __m256i (&v)[4]) {
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    const __m256i ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    return _mm256_max_epi8(ordered, _mm256_set1_epi8(-127));
}

BYTEBACK_INLINE void store_bytes(s8* to, const __m256i (&v)[4], AllLanes, bool stream = false) {
    if (stream)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), packed(v));
    else
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed(v));
}
template <class Lanes>
BYTEBACK_INLINE void store_bytes(s8* to, const __m256i (&v)[1], Lanes lanes, bool = false) {
    lanes.store_bytes(to, packed(v));
}

BYTEBACK_INLINE __m256 nan_as_zero(__m256 y) { return _mm256_and_ps(y, _mm256_cmp_ps(y, y, _CMP_ORD_Q)); }

template <class Lanes>
BYTEBACK_INLINE void keep_bf16(u16* to, __m256 x, Lanes lanes) {
    const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i words = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    words = _mm256_blendv_epi8(words, _mm256_set1_epi32(0x7FC0), nan);
    lanes.store_words(to, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

// x as int8 around its centre, V vectors; as a rule none of it is NaN.
template <int V, class Lanes>
BYTEBACK_INLINE void keep_some(s8* to, const __m256 (&x)[V], const f32* centre, const f32* inverse, Lanes lanes) {
    __m256 y[V], odd = _mm256_setzero_ps();
    __m256i q[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
        y[v] = _mm256_mul_ps(_mm256_sub_ps(x[v], _mm256_loadu_ps(centre + 8 * v)), _mm256_loadu_ps(inverse + 8 * v));
        odd = _mm256_or_ps(odd, _mm256_cmp_ps(y[v], y[v], _CMP_UNORD_Q));
    }
    const bool special = _mm256_movemask_ps(odd) != 0;
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
        const __m256 number = __builtin_expect(special, 0) ? nan_as_zero(y[v]) : y[v];
        q[v] = _mm256_cvtps_epi32(_mm256_min_ps(number, all(127.0f)));
    }
    store_bytes(to, q, lanes);
}

// ---- int8 ------------------------------------------------------------------------------------------------------------

constexpr u32 kPairStride = 0x9E3779B1u;

struct Clip {
    __m256 inverse, bound;
    __m256i ordinary;  // the bits of the largest magnitude that is finite and not beyond the bound

    // A clip that counts as 0 has inverse 0 and bound Inf: its integers are 0 and nothing is saturated.
    explicit Clip(f32 clip)
        : inverse(all(is_live(clip) ? inverse_scale(clip) : 0.0f)),
          bound(all(is_live(clip) ? clip : std::numeric_limits<f32>::infinity())),
          ordinary(_mm256_castps_si256(all(is_live(clip) ? clip : std::numeric_limits<f32>::max()))) {}
    Clip(__m256 inverses, __m256 bounds) : inverse(inverses), bound(bounds), ordinary(_mm256_setzero_si256()) {}
};

// Magnitudes are compared as integers: in that order NaN lies above Inf.
BYTEBACK_INLINE __m256i magnitude(__m256 v) { return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7FFFFFFF)); }

// What a thread saw, eight lanes each.
struct Tally {
    __m256i saturated = _mm256_setzero_si256();
    __m256i nonfinite = _mm256_setzero_si256();
    __m256i peak = _mm256_setzero_si256();

    // Counts what V vectors hold. Whether any of it is not finite.
    template <int V>
    BYTEBACK_INLINE bool see(const __m256 (&v)[V]) {
        __m256i most = magnitude(v[0]);
#pragma GCC unroll 4
        for (int i = 1; i < V; ++i) most = _mm256_max_epi32(most, magnitude(v[i]));
        peak = _mm256_max_epi32(peak, most);
        const __m256i limit = _mm256_set1_epi32(0x7F7FFFFF);
        if (__builtin_expect(_mm256_testz_si256(_mm256_cmpgt_epi32(most, limit), _mm256_set1_epi32(-1)), 1)) return false;
        for (int i = 0; i < V; ++i) nonfinite = _mm256_sub_epi32(nonfinite, _mm256_cmpgt_epi32(magnitude(v[i]), limit));
        return true;
    }

    // v * inverse, at most 127, not yet rounded. What lies below -127 becomes -127 when it is packed.
    BYTEBACK_INLINE __m256 scaled(__m256 v, const Clip& clip, bool special) {
        const __m256 over = _mm256_cmp_ps(_mm256_castsi256_ps(magnitude(v)), clip.bound, _CMP_GT_OQ);
        saturated = _mm256_sub_epi32(saturated, _mm256_castps_si256(over));
        const __m256 y = _mm256_mul_ps(v, clip.inverse);
        return _mm256_min_ps(__builtin_expect(special, 0) ? nan_as_zero(y) : y, all(127.0f));
    }

    // V vectors by one clip: counted, and y = v * inverse, not yet rounded. As a rule all of a block lies within the clip: then
    // there is nothing to count and nothing to cut off. Whether that was so.
    template <int V>
    BYTEBACK_INLINE bool scale(const __m256 (&v)[V], const Clip& clip, __m256 (&y)[V]) {
        __m256i most = magnitude(v[0]);
#pragma GCC unroll 4
        for (int i = 1; i < V; ++i) most = _mm256_max_epi32(most, magnitude(v[i]));
        if (__builtin_expect(_mm256_testz_si256(_mm256_cmpgt_epi32(most, clip.ordinary), _mm256_set1_epi32(-1)), 1)) {
            peak = _mm256_max_epi32(peak, most);
#pragma GCC unroll 4
            for (int i = 0; i < V; ++i) y[i] = _mm256_mul_ps(v[i], clip.inverse);
            return true;
        }
        const bool special = see(v);
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) y[i] = scaled(v[i], clip, special);
        return false;
    }

    Report report() const {
        alignas(32) s32 lanes[3][8];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[0]), saturated);
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[1]), nonfinite);
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[2]), peak);
        Report all{0, 0, 0.0f};
        s32 most = 0;
        for (int i = 0; i < 8; ++i) {
            all.saturated += lanes[0][i];
            all.nonfinite += lanes[1][i];
            most = lanes[2][i] > most ? lanes[2][i] : most;
        }
        std::memcpy(&all.peak, &most, sizeof(f32));
        return all;
    }
};

inline Report joined(const std::vector<Report>& parts) {
    Report all{0, 0, 0.0f};
    for (const Report& part : parts) {
        all.saturated += part.saturated;
        all.nonfinite += part.nonfinite;
        if (part.peak > all.peak || part.peak != part.peak) all.peak = part.peak;  // nothing is greater than a NaN
    }
    return all;
}

// The noise of a run of elements, of neighbouring channel pairs: 16 elements from eight hashes (quantize_avx2.cpp).
class PairNoise {
public:
    PairNoise(Noise noise, s64 pair) : k1_(_mm256_set1_epi32(static_cast<s32>(noise.k1))) {
        // The order that unpacking 16-bit halves within 128 bits turns into neighbours.
        const __m256i order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
        const __m256i first = _mm256_set1_epi32(static_cast<s32>(static_cast<u32>(pair) * kPairStride + noise.k0));
        hash_ = _mm256_add_epi32(first, _mm256_mullo_epi32(order, _mm256_set1_epi32(static_cast<s32>(kPairStride))));
    }

    // h16 in the upper half of each lane and 0x8000, the "+ 0.5", in the lower; for elements 0..7 and 8..15.
    BYTEBACK_INLINE void next16(__m256i& first, __m256i& second) {
        const __m256i h = mix(_mm256_xor_si256(hash_, k1_)), half = _mm256_set1_epi16(static_cast<s16>(0x8000));
        first = _mm256_unpacklo_epi16(half, h);
        second = _mm256_unpackhi_epi16(half, h);
        hash_ = _mm256_add_epi32(hash_, _mm256_set1_epi32(static_cast<s32>(8 * kPairStride)));
    }
    BYTEBACK_INLINE void next(__m256i (&u)[4]) { next16(u[0], u[1]), next16(u[2], u[3]); }
    BYTEBACK_INLINE void next(__m256i (&u)[1]) {
        __m256i second;
        next16(u[0], second);
        hash_ = _mm256_sub_epi32(hash_, _mm256_set1_epi32(static_cast<s32>(4 * kPairStride)));
    }

    // floor(y + u). u * 2^31 has 17 significant bits: exact as a float, and so is u. So the fused product and sum rounds once.
    static BYTEBACK_INLINE __m256 round(__m256 y, __m256i noise) {
        const __m256 u31 = _mm256_cvtepi32_ps(_mm256_srli_epi32(noise, 1));
        return _mm256_floor_ps(_mm256_fmadd_ps(u31, all(1.0f / 2147483648.0f), y));
    }

private:
    static BYTEBACK_INLINE __m256i mix(__m256i h) {
        h = _mm256_xor_si256(h, _mm256_srli_epi32(h, 16));
        h = _mm256_mullo_epi32(h, _mm256_set1_epi32(static_cast<s32>(0x85EBCA6Bu)));
        h = _mm256_xor_si256(h, _mm256_srli_epi32(h, 13));
        h = _mm256_mullo_epi32(h, _mm256_set1_epi32(static_cast<s32>(0xC2B2AE35u)));
        return _mm256_xor_si256(h, _mm256_srli_epi32(h, 16));
    }

    __m256i hash_, k1_;
};

// ---- from a number to a template argument ----------------------------------------------------------------------------

template <auto value>
struct Constant {
    static constexpr auto is = value;
};

template <class Body>
void with_activation(Activation activation, const Body& body) {
    switch (activation) {
        case Activation::none: return body(Constant<Activation::none>{});
        case Activation::relu: return body(Constant<Activation::relu>{});
        case Activation::relu6: return body(Constant<Activation::relu6>{});
        case Activation::hardswish: return body(Constant<Activation::hardswish>{});
        case Activation::silu: return body(Constant<Activation::silu>{});
    }
}

template <Stored stored, class Body>
void with_gate(Gate gate, const Body& body) {
    const Constant<stored> kind;
    switch (gate) {
        case Gate::open: return body(kind, Constant<Gate::open>{});
        case Gate::mask: return body(kind, Constant<Gate::mask>{});
        case Gate::relu: return body(kind, Constant<Gate::relu>{});
        case Gate::relu6: return body(kind, Constant<Gate::relu6>{});
        case Gate::hardswish: return body(kind, Constant<Gate::hardswish>{});
        case Gate::silu: return body(kind, Constant<Gate::silu>{});
    }
}

// body(how x was kept, gate)
template <class Body>
void with_backward(const Backward& from, const Body& body) {
    switch (from.x.kind) {
        case Stored::f32: return with_gate<Stored::f32>(from.gate, body);
        case Stored::bf16: return with_gate<Stored::bf16>(from.gate, body);
        case Stored::s8: return with_gate<Stored::s8>(from.gate, body);
    }
}

}  // namespace

}  // namespace byteback::avx2
