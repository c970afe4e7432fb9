// SPDX-License-Identifier: Apache-2.0
// max|x| and counts of |x| > threshold: statistics that need no order, so any lane may take any row. Compiled once per path,
// behind its vectors.
//
// Magnitudes are compared as integers. Non-negative floats have the order of their bits, and NaN lies above Inf: so a NaN
// anywhere becomes the maximum without a test of its own.
//
// Channels last: an accumulator for every element of a period (rows.h) stays in the first cache, and four rows are folded
// into it at once. NCHW: each plane is folded by itself.
#pragma once

#include <cstring>
#include <vector>

#include "core/generic.h"
#include "core/parallel.h"
#include "elementwise/rows.h"

namespace byteback::BYTEBACK_PATH {

namespace {

// Four rows are four streams to the hardware. Where they lie together, what follows is fetched in the order of memory, four
// vectors at a time. May lie behind the end: a prefetch never faults.
inline void fetch(uintptr_t at) {
    for (s64 line = 0; line < kBlock * static_cast<s64>(sizeof(f32)); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(at + line), 0, 2);
}

struct Peak {
    static constexpr bool reads_threshold = false;
    static BYTEBACK_INLINE Ints step(Ints acc, Floats x, Floats) { return max32(acc, magnitude(x)); }
    static BYTEBACK_INLINE Ints join(Ints a, Ints b) { return max32(a, b); }
    static s64 join(s64 a, s64 b) { return a > b ? a : b; }
};

struct Above {
    static constexpr bool reads_threshold = true;
    static BYTEBACK_INLINE Ints step(Ints acc, Floats x, Floats threshold) {
        return counted(acc, greater(absolute(x), threshold));
    }
    static BYTEBACK_INLINE Ints join(Ints a, Ints b) { return add32(a, b); }
    static s64 join(s64 a, s64 b) { return a + b; }
};

// acc[e] = step(acc[e], x[row][e], threshold[e]) for `count` long rows. acc and threshold are padded to whole vectors.
template <class Op, int count>
void fold_rows(const f32* x, s64 stride, s64 width, const f32* threshold, s32* acc) {
    s64 e = 0;
    for (; e + kLanes <= width; e += kLanes) {
        if (count == 4 && stride == width) fetch(reinterpret_cast<uintptr_t>(x) + 4 * (width + e) * sizeof(f32));
        const Floats limit = Op::reads_threshold ? load(threshold + e) : all(0.0f);
        Ints value = load(acc + e);
        for (int row = 0; row < count; ++row) value = Op::step(value, load(x + row * stride + e), limit);
        store(acc + e, value);
    }
    if (e == width) return;
    const FirstLanes lanes(width - e);
    Ints value = load(acc + e);
    for (int row = 0; row < count; ++row) value = Op::step(value, lanes.load(x + row * stride + e), load(threshold + e));
    lanes.store(acc + e, value);  // a threshold below 0 counts the zeros of lanes that are off
}

// All elements of a contiguous piece into one number.
template <class Op>
s64 fold_piece(const f32* x, s64 n, f32 threshold) {
    const Floats limit = all(threshold);
    Ints acc[4] = {all32(0), all32(0), all32(0), all32(0)};
    s64 e = 0;
    for (; e + kBlock <= n; e += kBlock)
        for (int v = 0; v < 4; ++v) acc[v] = Op::step(acc[v], load(x + e + kLanes * v), limit);
    for (; e + kLanes <= n; e += kLanes) acc[0] = Op::step(acc[0], load(x + e), limit);
    if (e < n) {
        const FirstLanes lanes(n - e);
        // A threshold below 0 counts the zeros of lanes that are off.
        acc[1] = Op::join(acc[1], lanes.only(Op::step(all32(0), lanes.load(x + e), limit)));
    }
    s32 lane[kLanes];
    store(lane, Op::join(Op::join(acc[0], acc[1]), Op::join(acc[2], acc[3])));
    s64 total = 0;
    for (s32 value : lane) total = Op::join(total, s64{value});
    return total;
}

struct PeriodTag {};

// A period's accumulators and thresholds in the thread's scratch memory.
struct Period {
    s32* acc;
    f32* threshold;

    explicit Period(const Cut& cut) {
        const s64 room = cut.period() + kLanes;
        acc = reinterpret_cast<s32*>(scratch<PeriodTag>(2 * room * sizeof(f32)));
        threshold = reinterpret_cast<f32*>(acc + room);
        std::memset(acc, 0, 2 * room * sizeof(f32));
    }

    void set_thresholds(const Cut& cut, const Cut::Unit& unit, PerScale values) {
        for (s64 e = 0; e < cut.together * unit.width; ++e) threshold[e] = values.at(unit.outer, unit.channel + e % unit.width);
    }

    // Joins the copies of each channel into its total and starts anew.
    template <class Op>
    void flush(const Cut& cut, const Cut::Unit& unit, s64* totals) {
        for (s64 row = 0; row < cut.together; ++row)
            for (s64 c = 0; c < unit.width; ++c) {
                s64& total = totals[unit.channel + c];
                total = Op::join(total, s64{acc[row * unit.width + c]});
            }
        std::memset(acc, 0, cut.period() * sizeof(s32));
    }
};

template <class Op>
void channels_last(const Rows& rows, const f32* x, PerScale threshold, int threads, s64* totals) {
    const Cut cut(rows);
    parallel_ranges(threads, cut.units(), [&](int thread, s64 begin, s64 end) {
        Period period(cut);
        Cut::Unit last{-1, 0, -1, 0, 0};
        s64* mine = totals + thread * rows.channels;
        for (s64 index = begin; index < end; ++index) {
            const Cut::Unit unit = cut.unit(rows, index);
            const bool other_tile = unit.channel != last.channel;
            if (other_tile && index > begin) period.flush<Op>(cut, last, mine);
            if (Op::reads_threshold && (other_tile || (threshold.outer_stride && unit.outer != last.outer)))
                period.set_thresholds(cut, unit, threshold);
            last = unit;
            const f32* from = x + unit.outer * rows.outer_stride + unit.channel;
            const s64 width = cut.together * unit.width, stride = cut.together * rows.inner_stride;
            s64 i = unit.begin;
            for (; i + 4 * cut.together <= unit.end; i += 4 * cut.together)
                fold_rows<Op, 4>(from + i * rows.inner_stride, stride, width, period.threshold, period.acc);
            for (; i < unit.end; i += cut.together) {
                const s64 some = unit.end - i < cut.together ? unit.end - i : cut.together;
                fold_rows<Op, 1>(from + i * rows.inner_stride, 0, some * unit.width, period.threshold, period.acc);
            }
        }
        period.flush<Op>(cut, last, mine);
    });
}

template <class Op>
void planes(const Rows& rows, const f32* x, PerScale threshold, int threads, s64* totals) {
    const s64 pieces = ceil_div(rows.inner, kUnitWork);
    parallel_ranges(threads, rows.outer * rows.channels * pieces, [&](int thread, s64 begin, s64 end) {
        s64* mine = totals + thread * rows.channels;
        for (s64 index = begin; index < end; ++index) {
            const s64 c = index / pieces % rows.channels, o = index / pieces / rows.channels;
            const s64 first = index % pieces * kUnitWork;
            const s64 n = rows.inner - first < kUnitWork ? rows.inner - first : kUnitWork;
            const f32* from = x + o * rows.outer_stride + c * rows.channel_stride + first;
            mine[c] = Op::join(mine[c], fold_piece<Op>(from, n, Op::reads_threshold ? threshold.at(o, c) : 0.0f));
        }
    });
}

// The total of channel c at [c], what lies behind is of no use. Rows must be channels last or planes.
template <class Op>
std::vector<s64> per_channel(const Rows& rows, const f32* x, PerScale threshold, int threads) {
    threads = useful_threads(threads, rows.count() * rows.channels);
    threads = threads > 1 ? threads : 1;
    std::vector<s64> totals(threads * rows.channels, 0);
    (rows.channels_last() ? channels_last<Op> : planes<Op>)(rows, x, threshold, threads, totals.data());
    for (s64 i = rows.channels; i < threads * rows.channels; ++i) {
        s64& total = totals[i % rows.channels];
        total = Op::join(total, totals[i]);
    }
    return totals;
}

bool has_kernel(const Rows& rows) { return rows.channels_last() || rows.inner_stride == 1; }

f32 from_bits(s64 bits) {
    const s32 word = static_cast<s32>(bits);
    f32 value;
    std::memcpy(&value, &word, sizeof(f32));
    return value;
}

}  // namespace

void absmax(const Rows& given, const f32* x, f32* result, int threads) {
    const Rows rows = merged(given);
    if (!has_kernel(rows)) return generic::absmax(rows, x, result, threads);
    const auto totals = per_channel<Peak>(rows, x, PerScale{nullptr, 0, 0}, threads);
    for (s64 c = 0; c < rows.channels; ++c) result[c] = from_bits(totals[c]);
}

void tail_count(const Rows& given, const f32* x, PerScale threshold, s64* counts, int threads) {
    const Rows rows = threshold.outer_stride ? given : merged(given);
    if (!has_kernel(rows)) return generic::tail_count(rows, x, threshold, counts, threads);
    const auto totals = per_channel<Above>(rows, x, threshold, threads);
    for (s64 c = 0; c < rows.channels; ++c) counts[c] = totals[c];
}

void absmax_outer(const Rows& rows, const f32* x, f32* per_outer, int threads) {
    const bool rows_touch = rows.channel_stride == 1 && (rows.inner_stride == rows.channels || rows.inner == 1);
    const bool planes_touch = rows.inner_stride == 1 && (rows.channel_stride == rows.inner || rows.channels == 1);
    if (!rows_touch && !planes_touch) return generic::absmax_outer(rows, x, per_outer, threads);
    const s64 sample = rows.inner * rows.channels, pieces = ceil_div(sample, kUnitWork);
    threads = useful_threads(threads, rows.outer * sample);
    threads = threads > 1 ? threads : 1;
    std::vector<s64> peaks(threads * rows.outer, 0);
    parallel_ranges(threads, rows.outer * pieces, [&](int thread, s64 begin, s64 end) {
        for (s64 index = begin; index < end; ++index) {
            const s64 o = index / pieces, first = index % pieces * kUnitWork;
            const s64 n = sample - first < kUnitWork ? sample - first : kUnitWork;
            s64& peak = peaks[thread * rows.outer + o];
            peak = Peak::join(peak, fold_piece<Peak>(x + o * rows.outer_stride + first, n, 0.0f));
        }
    });
    for (s64 o = 0; o < rows.outer; ++o) {
        s64 peak = 0;
        for (int thread = 0; thread < threads; ++thread) peak = Peak::join(peak, peaks[thread * rows.outer + o]);
        per_outer[o] = from_bits(peak);
    }
}

}  // namespace byteback::BYTEBACK_PATH
