// SPDX-License-Identifier: Apache-2.0
// Quantize, eight floats at a time; quantize_generic.cpp says the same in plain words.
//
//   x ─ × inverse ─ NaN → 0 ─ clamp ±127 ─┬───────────── round half to even ─┬─► 4 x 8 int32 ─► 32 int8
//     └─► |x| > bound, |x| = Inf, max|x|  └─ + u ─ floor ────────────────────┘
//
// Every run of elements has its per-channel constants laid out beside it (Constants), a period of about 1024 elements that
// stays in the first cache. So one loop serves a clip per tensor, per sample and per channel, wide rows and narrow ones.
// A clip that counts as 0 has inverse 0 and bound Inf: y is 0 or NaN, both become 0, and nothing is saturated.
//
// Noise costs a hash for every pair of channels. Two ways to lay it out:
//   pairs  channels last: 8 hashes serve 16 neighbours, low half and high half.
//   table  where neighbours share no hash (NCHW), or pairs break at the end of a row (odd channels): a hash per element, at
//          base + steps[e], which half being a shift.
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/avx2.h"
#include "core/generic.h"
#include "core/parallel.h"
#include "elementwise/rows.h"

namespace byteback::avx2 {

namespace {

constexpr u32 kPairStride = 0x9E3779B1u;
constexpr s64 kBlock = 32;  // elements of one step: four vectors of floats, one of bytes

enum class Rounding { nearest, pairs, table };

// The constants of a period. All arrays are padded to a multiple of kBlock.
struct Constants {
    f32* inverse;
    f32* bound;
    u32* steps;   // table: index of the element's pair, relative to the period's first, times kPairStride
    u32* left;    // table: shift that brings the element's half of the hash to the top
    s64 advance;  // 1, or 0 where inverse, bound and left are the same for all elements and only kBlock long
};

struct ConstantsTag {};

Constants make_constants(s64 period, s64 advance) {
    const s64 room = period + kBlock;
    char* memory = scratch<ConstantsTag>(4 * room * sizeof(f32));
    f32* floats = reinterpret_cast<f32*>(memory);
    u32* words = reinterpret_cast<u32*>(memory + 2 * room * sizeof(f32));
    std::memset(memory, 0, 4 * room * sizeof(f32));
    return {floats, floats + room, words, words + room, advance};
}

f32 inverse_of(f32 clip) { return is_live(clip) ? inverse_scale(clip) : 0.0f; }
f32 bound_of(f32 clip) { return is_live(clip) ? clip : std::numeric_limits<f32>::infinity(); }

// What a run saw, eight lanes each. Magnitudes are compared as integers: in that order NaN lies above Inf.
struct Tally {
    __m256i saturated = _mm256_setzero_si256();
    __m256i nonfinite = _mm256_setzero_si256();
    __m256i peak = _mm256_setzero_si256();
};

struct Totals {
    s64 saturated = 0;
    s64 nonfinite = 0;
    s32 peak = 0;

    void add(const Tally& tally) {
        alignas(32) s32 lanes[3][8];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[0]), tally.saturated);
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[1]), tally.nonfinite);
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[2]), tally.peak);
        for (int lane = 0; lane < 8; ++lane) {
            saturated += lanes[0][lane];
            nonfinite += lanes[1][lane];
            peak = lanes[2][lane] > peak ? lanes[2][lane] : peak;
        }
    }
};

inline __m256i load(const u32* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

inline __m256i mix(__m256i h) {
    h = _mm256_xor_si256(h, _mm256_srli_epi32(h, 16));
    h = _mm256_mullo_epi32(h, _mm256_set1_epi32(static_cast<s32>(0x85EBCA6Bu)));
    h = _mm256_xor_si256(h, _mm256_srli_epi32(h, 13));
    h = _mm256_mullo_epi32(h, _mm256_set1_epi32(static_cast<s32>(0xC2B2AE35u)));
    return _mm256_xor_si256(h, _mm256_srli_epi32(h, 16));
}

// y + u. `noise` holds h16 in the upper half of each lane and 0x8000, the "+ 0.5", in the lower. Shifted by one it is
// u * 2^31 with 17 significant bits: exact as a float, and so is u. So the fused product and sum rounds once, as y + u does.
inline __m256 add_uniform(__m256 y, __m256i noise) {
    const __m256 u31 = _mm256_cvtepi32_ps(_mm256_srli_epi32(noise, 1));
    return _mm256_fmadd_ps(u31, _mm256_set1_ps(1.0f / 2147483648.0f), y);
}

// x * inverse, NaN replaced by 0, clamped to ±127.
inline __m256 scaled(__m256 x, __m256 inverse, __m256 bound, Tally& tally) {
    const __m256 magnitude = _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF)));
    const __m256i bits = _mm256_castps_si256(magnitude);
    const __m256 over = _mm256_cmp_ps(magnitude, bound, _CMP_GT_OQ);
    tally.saturated = _mm256_sub_epi32(tally.saturated, _mm256_castps_si256(over));
    tally.nonfinite = _mm256_sub_epi32(tally.nonfinite, _mm256_cmpgt_epi32(bits, _mm256_set1_epi32(0x7F7FFFFF)));
    tally.peak = _mm256_max_epi32(tally.peak, bits);
    __m256 y = _mm256_mul_ps(x, inverse);
    y = _mm256_and_ps(y, _mm256_cmp_ps(y, y, _CMP_ORD_Q));
    return _mm256_min_ps(_mm256_max_ps(y, _mm256_set1_ps(-127.0f)), _mm256_set1_ps(127.0f));
}

// Four vectors of int32 as 32 bytes in order. Packing works within 128-bit halves, so the last step puts the words right.
inline __m256i packed(const __m256i (&v)[4]) {
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// Quantizes kBlock elements. hash: pairs: the state of the first eight pairs; table: the base, in all lanes.
template <Rounding rounding>
inline __m256i block(const f32* x, const Constants& k, s64 e, __m256i hash, __m256i k1, Tally& tally) {
    const __m256i half = _mm256_set1_epi32(0x8000);
    const f32* inverse = k.inverse + e * k.advance;
    const f32* bound = k.bound + e * k.advance;
    __m256i noise[4], result[4];
    if constexpr (rounding == Rounding::pairs) {
        const __m256i low = mix(_mm256_xor_si256(hash, k1));
        const __m256i next = _mm256_add_epi32(hash, _mm256_set1_epi32(static_cast<s32>(8 * kPairStride)));
        const __m256i high = mix(_mm256_xor_si256(next, k1));
        const __m256i half16 = _mm256_set1_epi16(static_cast<s16>(0x8000));
        noise[0] = _mm256_unpacklo_epi16(half16, low);
        noise[1] = _mm256_unpackhi_epi16(half16, low);
        noise[2] = _mm256_unpacklo_epi16(half16, high);
        noise[3] = _mm256_unpackhi_epi16(half16, high);
    }
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
        __m256 y = scaled(_mm256_loadu_ps(x + 8 * v), _mm256_loadu_ps(inverse + 8 * v), _mm256_loadu_ps(bound + 8 * v), tally);
        if constexpr (rounding == Rounding::table) {
            const __m256i h = mix(_mm256_xor_si256(_mm256_add_epi32(hash, load(k.steps + e + 8 * v)), k1));
            noise[v] = _mm256_blend_epi16(_mm256_sllv_epi32(h, load(k.left + e * k.advance + 8 * v)), half, 0x55);
        }
        if constexpr (rounding != Rounding::nearest) y = _mm256_floor_ps(add_uniform(y, noise[v]));
        result[v] = _mm256_cvtps_epi32(y);  // half to even; exact after floor
    }
    return packed(result);
}

// Elements that run will read `ahead` bytes further on. Where a tile is not the whole row, the hardware cannot foresee them.
// May lie behind the end of the tensor: a prefetch never faults.
inline void fetch(const f32* x, s64 ahead) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(x) + ahead;
    _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(at + 64), _MM_HINT_T0);
}

// Quantizes n <= period elements whose constants are k. base = index of the first pair * kPairStride + k0.
template <Rounding rounding>
void run(const f32* x, s64 ahead, s8* q, s64 n, const Constants& k, u32 base, u32 k1_word, Totals& totals) {
    Tally tally;
    const __m256i k1 = _mm256_set1_epi32(static_cast<s32>(k1_word));
    __m256i hash = _mm256_set1_epi32(static_cast<s32>(base));
    // The order that unpacking 16-bit halves within 128 bits turns into neighbours.
    const __m256i order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
    const __m256i stride = _mm256_set1_epi32(static_cast<s32>(kPairStride));
    if (rounding == Rounding::pairs) hash = _mm256_add_epi32(hash, _mm256_mullo_epi32(order, stride));
    s64 e = 0;
    for (; e + kBlock <= n; e += kBlock) {
        fetch(x + e, ahead);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + e), block<rounding>(x + e, k, e, hash, k1, tally));
        if (rounding == Rounding::pairs)
            hash = _mm256_add_epi32(hash, _mm256_set1_epi32(static_cast<s32>(kBlock / 2 * kPairStride)));
    }
    if (e < n) {
        // Zeros behind the end are seen by no count.
        alignas(32) f32 ragged[kBlock] = {};
        alignas(32) s8 bytes[kBlock];
        std::memcpy(ragged, x + e, (n - e) * sizeof(f32));
        _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), block<rounding>(ragged, k, e, hash, k1, tally));
        std::memcpy(q + e, bytes, n - e);
    }
    totals.add(tally);
}

// The constants of one tile, repeated for the rows that are taken together.
void fill_clips(const Constants& k, const Cut& cut, const Cut::Unit& unit, PerScale clip) {
    for (s64 c = 0; c < unit.width; ++c) {
        k.inverse[c] = inverse_of(clip.at(unit.outer, unit.channel + c));
        k.bound[c] = bound_of(clip.at(unit.outer, unit.channel + c));
    }
    for (s64 row = 1; row < cut.together; ++row) {
        std::memcpy(k.inverse + row * unit.width, k.inverse, unit.width * sizeof(f32));
        std::memcpy(k.bound + row * unit.width, k.bound, unit.width * sizeof(f32));
    }
}

void fill_steps(const Constants& k, const Cut& cut) {
    for (s64 e = 0; e < cut.period(); ++e) {
        const s64 row = e / cut.tile, c = e % cut.tile;
        k.steps[e] = static_cast<u32>(row * ceil_div(cut.tile, 2) + c / 2) * kPairStride;
        k.left[e] = c % 2 ? 0 : 16;
    }
}

template <Rounding rounding>
void channels_last(const Rows& rows, const f32* x, PerScale clip, Noise noise, s8* q, int threads, Totals* totals) {
    const Cut cut(rows);
    const s64 pairs = ceil_div(rows.channels, 2), ahead = cut.together * rows.inner_stride * static_cast<s64>(sizeof(f32));
    parallel_ranges(threads, cut.units(), [&](int thread, s64 begin, s64 end) {
        const Constants k = make_constants(cut.period(), 1);
        if (rounding == Rounding::table) fill_steps(k, cut);
        Totals seen;
        s64 filled_outer = -1, filled_channel = -1;
        for (s64 index = begin; index < end; ++index) {
            const Cut::Unit unit = cut.unit(rows, index);
            if (unit.channel != filled_channel || (clip.outer_stride && unit.outer != filled_outer)) {
                fill_clips(k, cut, unit, clip);
                filled_outer = unit.outer, filled_channel = unit.channel;
            }
            for (s64 i = unit.begin; i < unit.end; i += cut.together) {
                const s64 n = (unit.end - i < cut.together ? unit.end - i : cut.together) * unit.width;
                const s64 at = unit.outer * rows.outer_stride + i * rows.inner_stride + unit.channel;
                const s64 pair = (unit.outer * rows.inner + i) * pairs + unit.channel / 2;
                const u32 base = static_cast<u32>(pair) * kPairStride + noise.k0;
                run<rounding>(x + at, ahead, q + at, n, k, base, noise.k1, seen);
            }
        }
        totals[thread] = seen;
    });
}

// NCHW, and whatever counts as one plane: a unit is a piece of one channel's plane.
template <Rounding rounding>
void planes(const Rows& rows, const f32* x, PerScale clip, Noise noise, s8* q, int threads, Totals* totals) {
    const s64 pairs = ceil_div(rows.channels, 2), pieces = ceil_div(rows.inner, kUnitWork);
    parallel_ranges(threads, rows.outer * rows.channels * pieces, [&](int thread, s64 begin, s64 end) {
        const Constants k = make_constants(rounding == Rounding::table ? kPeriod : 0, 0);
        if (rounding == Rounding::table)
            for (s64 e = 0; e < kPeriod; ++e) k.steps[e] = static_cast<u32>(e * pairs) * kPairStride;
        Totals seen;
        for (s64 index = begin; index < end; ++index) {
            const s64 c = index / pieces % rows.channels, o = index / pieces / rows.channels;
            const s64 first = index % pieces * kUnitWork;
            const s64 last = first + kUnitWork < rows.inner ? first + kUnitWork : rows.inner;
            std::fill_n(k.inverse, kBlock, inverse_of(clip.at(o, c)));
            std::fill_n(k.bound, kBlock, bound_of(clip.at(o, c)));
            std::fill_n(k.left, kBlock, c % 2 ? 0u : 16u);
            for (s64 i = first; i < last; i += kPeriod) {
                const s64 n = last - i < kPeriod ? last - i : kPeriod;
                const s64 at = o * rows.outer_stride + c * rows.channel_stride + i;
                const s64 pair = (o * rows.inner + i) * pairs + c / 2;
                const u32 base = static_cast<u32>(pair) * kPairStride + noise.k0;
                run<rounding>(x + at, n * sizeof(f32), q + at, n, k, base, noise.k1, seen);
            }
        }
        totals[thread] = seen;
    });
}

// Whether a sample's elements lie together in either memory format. Then, for what varies along no channel, it is one plane.
bool is_dense(const Rows& rows) {
    const bool planes = rows.inner_stride == 1 && rows.channel_stride == rows.inner;
    return planes || (rows.channel_stride == 1 && rows.inner_stride == rows.channels);
}

Rows one_plane(const Rows& rows) {
    const s64 size = rows.channels * rows.inner;
    return {rows.outer, size, 1, rows.outer_stride, 1, size};
}

Report report(const std::vector<Totals>& parts) {
    Totals all;
    for (const Totals& part : parts) {
        all.saturated += part.saturated;
        all.nonfinite += part.nonfinite;
        all.peak = part.peak > all.peak ? part.peak : all.peak;
    }
    Report result{all.saturated, all.nonfinite, 0.0f};
    std::memcpy(&result.peak, &all.peak, sizeof(f32));
    return result;
}

}  // namespace

Report quantize(const Rows& given, const f32* x, PerScale clip, Noise noise, s8* q, int threads) {
    const bool flat = !noise.stochastic && clip.channel_stride == 0 && is_dense(given);
    const Rows single = flat ? one_plane(given) : given;
    const Rows rows = clip.outer_stride ? single : merged(single);
    threads = useful_threads(threads, rows.count() * rows.channels);
    std::vector<Totals> totals(threads > 1 ? threads : 1);
    if (rows.channels_last() && !flat) {
        const bool broken_pairs = rows.channels % 2 && Cut(rows).together > 1;
        const auto kernel = !noise.stochastic ? channels_last<Rounding::nearest>
                            : broken_pairs    ? channels_last<Rounding::table>
                                              : channels_last<Rounding::pairs>;
        kernel(rows, x, clip, noise, q, threads, totals.data());
    } else if (rows.inner_stride == 1) {
        const auto kernel = noise.stochastic ? planes<Rounding::table> : planes<Rounding::nearest>;
        kernel(rows, x, clip, noise, q, threads, totals.data());
    } else {
        return generic::quantize(rows, x, clip, noise, q, threads);
    }
    return report(totals);
}

bool any_negative(const s8* values, s64 n, int threads) {
    constexpr s64 kBytes = 1 << 14;
    std::atomic<bool> found{false};
    parallel_for(useful_threads(threads, n / 4), ceil_div(n, kBytes), [&](s64 index) {
        if (found.load(std::memory_order_relaxed)) return;
        const s64 end = (index + 1) * kBytes < n ? (index + 1) * kBytes : n;
        s64 at = index * kBytes;
        __m256i signs = _mm256_setzero_si256();
        for (; at + 32 <= end; at += 32)
            signs = _mm256_or_si256(signs, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + at)));
        bool negative = _mm256_movemask_epi8(signs) != 0;
        for (; at < end; ++at) negative |= values[at] < 0;
        if (negative) found.store(true, std::memory_order_relaxed);
    });
    return found.load();
}

}  // namespace byteback::avx2
