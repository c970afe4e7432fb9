// SPDX-License-Identifier: Apache-2.0
// Quantize, a vector of floats at a time; quantize_generic.cpp says the same in plain words. Compiled once per path, behind its
// vectors.
//
//   x ─ × inverse ─ NaN → 0 ─ clamp ±127 ─┬───────────── round half to even ─┬─► 4 vectors of int32 ─► int8
//     └─► |x| > bound, |x| = Inf, max|x|  └─ + u ─ floor ────────────────────┘
//
// Every run of elements has its per-channel constants laid out beside it (Constants), a period of about 1024 elements that
// stays in the first cache. So one loop is enough for a clip per tensor, per sample and per channel, wide rows and narrow ones.
// A clip that counts as 0 has inverse 0 and bound Inf: y is 0 or NaN, both become 0, and nothing is saturated.
//
// Noise costs a hash for every pair of channels. Two ways to lay it out:
//   pairs  channels last: a vector of hashes is for two vectors of neighbours, low half and high half.
//   table  where neighbours share no hash (NCHW), or pairs break at the end of a row (odd channels): a hash per element, at
//          base + steps[e], which half being a shift.
#pragma once

#include <algorithm>
#include <atomic>

#include "contract_vector.h"
#include "core/generic.h"
#include "core/parallel.h"
#include "elementwise/rows.h"

namespace byteback::BYTEBACK_PATH {

namespace {

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

// Where a run's noise comes from: the state of its pairs, or for a table that of its first pair, in all lanes.
template <Rounding rounding>
struct RunNoise {
    PairNoise pairs;
    Ints base, k1;

    RunNoise(const Noise& noise, s64 pair) : pairs(noise, pair), base(all32(pair_state(noise, pair))), k1(all32(noise.k1)) {}

    // Of the kBlock elements from e on.
    BYTEBACK_INLINE void next(const Constants& k, s64 e, Ints (&u)[4]) {
        if constexpr (rounding == Rounding::pairs) pairs.next(u);
        if constexpr (rounding == Rounding::table)
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) {
                const Ints h = mix32(xor32(add32(base, load(k.steps + e + kLanes * v)), k1));
                u[v] = upper_halves(shl32(h, load(k.left + e * k.advance + kLanes * v)));
            }
    }
};

// Quantizes kBlock elements, or the first of them.
template <Rounding rounding, class Lanes>
BYTEBACK_INLINE void block(const f32* x, s8* q, const Constants& k, s64 e, RunNoise<rounding>& noise, Tally& tally,
                           Lanes lanes) {
    const f32* inverse = k.inverse + e * k.advance;
    const f32* bound = k.bound + e * k.advance;
    Floats value[4], y[4];
    Ints u[4], result[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) value[v] = lanes.load(x, v);
    tally.scale(value, inverse, bound, y);
    noise.next(k, e, u);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
        if constexpr (rounding == Rounding::nearest)
            result[v] = to_ints(y[v]);  // half to even
        else
            result[v] = rounded_stochastically(y[v], u[v]);
    }
    lanes.store_bytes(q, result);
}

// Elements that run will read `ahead` bytes further on. Where a tile is not the whole row, the hardware cannot foresee them.
// May lie behind the end of the tensor: a prefetch never faults.
inline void fetch(const f32* x, s64 ahead) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(x) + ahead;
    for (s64 line = 0; line < kBlock * static_cast<s64>(sizeof(f32)); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(at + line));
}

// Quantizes n <= period elements whose constants are k; `pair` is the index of the first pair.
template <Rounding rounding>
void run(const f32* x, s64 ahead, s8* q, s64 n, const Constants& k, const Noise& noise, s64 pair, Tally& seen) {
    Tally tally = seen;  // in registers
    RunNoise<rounding> state(noise, pair);
    s64 e = 0;
    for (; e + kBlock <= n; e += kBlock) {
        fetch(x + e, ahead);
        block(x + e, q + e, k, e, state, tally, AllOfBlock{});
    }
    // Zeros behind the end are seen by no count.
    if (e < n) block(x + e, q + e, k, e, state, tally, FirstOfBlock{n - e});
    seen = tally;
}

// The constants of one tile, repeated for the rows that are taken together.
void fill_clips(const Constants& k, const Cut& cut, const Cut::Unit& unit, PerScale clip) {
    for (s64 c = 0; c < unit.width; ++c) {
        k.inverse[c] = inverse_or_zero(clip.at(unit.outer, unit.channel + c));
        k.bound[c] = bound_or_infinity(clip.at(unit.outer, unit.channel + c));
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
void channels_last(const Rows& rows, const f32* x, PerScale clip, Noise noise, s8* q, int threads, Report* reports) {
    const Cut cut(rows);
    const s64 pairs = ceil_div(rows.channels, 2), ahead = cut.together * rows.inner_stride * static_cast<s64>(sizeof(f32));
    parallel_ranges(threads, cut.units(), [&](int thread, s64 begin, s64 end) {
        const Constants k = make_constants(cut.period(), 1);
        if (rounding == Rounding::table) fill_steps(k, cut);
        Tally seen;
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
                run<rounding>(x + at, ahead, q + at, n, k, noise, pair, seen);
            }
        }
        reports[thread] = seen.report();
    });
}

// NCHW, and whatever counts as one plane: a unit is a piece of one channel's plane.
template <Rounding rounding>
void planes(const Rows& rows, const f32* x, PerScale clip, Noise noise, s8* q, int threads, Report* reports) {
    const s64 pairs = ceil_div(rows.channels, 2), pieces = ceil_div(rows.inner, kUnitWork);
    parallel_ranges(threads, rows.outer * rows.channels * pieces, [&](int thread, s64 begin, s64 end) {
        const Constants k = make_constants(rounding == Rounding::table ? kPeriod : 0, 0);
        if (rounding == Rounding::table)
            for (s64 e = 0; e < kPeriod; ++e) k.steps[e] = static_cast<u32>(e * pairs) * kPairStride;
        Tally seen;
        for (s64 index = begin; index < end; ++index) {
            const s64 c = index / pieces % rows.channels, o = index / pieces / rows.channels;
            const s64 first = index % pieces * kUnitWork;
            const s64 last = first + kUnitWork < rows.inner ? first + kUnitWork : rows.inner;
            std::fill_n(k.inverse, kBlock, inverse_or_zero(clip.at(o, c)));
            std::fill_n(k.bound, kBlock, bound_or_infinity(clip.at(o, c)));
            std::fill_n(k.left, kBlock, c % 2 ? 0u : 16u);
            for (s64 i = first; i < last; i += kPeriod) {
                const s64 n = last - i < kPeriod ? last - i : kPeriod;
                const s64 at = o * rows.outer_stride + c * rows.channel_stride + i;
                const s64 pair = (o * rows.inner + i) * pairs + c / 2;
                run<rounding>(x + at, n * sizeof(f32), q + at, n, k, noise, pair, seen);
            }
        }
        reports[thread] = seen.report();
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

}  // namespace

Report quantize(const Rows& given, const f32* x, PerScale clip, Noise noise, s8* q, int threads) {
    const bool flat = !noise.stochastic && clip.channel_stride == 0 && is_dense(given);
    const Rows single = flat ? one_plane(given) : given;
    const Rows rows = clip.outer_stride ? single : merged(single);
    threads = useful_threads(threads, rows.count() * rows.channels);
    std::vector<Report> reports(threads > 1 ? threads : 1, Report{0, 0, 0.0f});
    if (rows.channels_last() && !flat) {
        const bool broken_pairs = rows.channels % 2 && Cut(rows).together > 1;
        const auto kernel = !noise.stochastic ? channels_last<Rounding::nearest>
                            : broken_pairs    ? channels_last<Rounding::table>
                                              : channels_last<Rounding::pairs>;
        kernel(rows, x, clip, noise, q, threads, reports.data());
    } else if (rows.inner_stride == 1) {
        const auto kernel = noise.stochastic ? planes<Rounding::table> : planes<Rounding::nearest>;
        kernel(rows, x, clip, noise, q, threads, reports.data());
    } else {
        return generic::quantize(rows, x, clip, noise, q, threads);
    }
    return joined(reports);
}

bool any_negative(const s8* values, s64 n, int threads) {
    constexpr s64 kBytes = 1 << 14;
    std::atomic<bool> found{false};
    parallel_for(useful_threads(threads, n / 4), ceil_div(n, kBytes), [&](s64 index) {
        if (found.load(std::memory_order_relaxed)) return;
        const s64 end = (index + 1) * kBytes < n ? (index + 1) * kBytes : n;
        s64 at = index * kBytes;
        Ints signs = all32(0);
        for (; at + kBlock <= end; at += kBlock) signs = or32(signs, load(static_cast<const void*>(values + at)));
        bool negative = any_negative_byte(signs);
        for (; at < end; ++at) negative |= values[at] < 0;
        if (negative) found.store(true, std::memory_order_relaxed);
    });
    return found.load();
}

}  // namespace byteback::BYTEBACK_PATH
