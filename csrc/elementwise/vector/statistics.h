// SPDX-License-Identifier: Apache-2.0
// The float64 sums: moments, the slope of a clip's cosine, the dot products of a tensor and its integers. cosine.h has the
// cosine of many clips.
//
// The order of additions is the contract's (ops/statistics.py). Within a block of 64 rows a channel is one chain, so lanes are
// channels. The blocks form a halving tree, block i with block i + n/2: its even leaves and its odd leaves are summed by
// themselves, then joined. Depth-first, this needs one spare vector per level and never the sums of all blocks:
//
//   T(first, stride) = T(first, 2 stride) + T(first + stride, 2 stride)        T(block, n) = the block's own sum
//
// A unit of work is one subtree for one tile of channels: the blocks that are equal to `first` modulo `residues`. For narrow
// tiles it takes `joint` neighbouring subtrees at once, so that memory is read in long stretches.
// Other layouts than channels last are first packed into that form, one block at a time.
//
// A clip that counts as 0 gives nothing to search in: it goes to the generic path.
// Fused multiply-adds appear only where the product is exact in float64, so that they round where the reference does.
// Compiled once per path, behind its vectors and its tiles.
#pragma once

#include <cstring>
#include <vector>

#include "core/generic.h"
#include "elementwise/vector/ordered_sums.h"

namespace byteback::BYTEBACK_PATH {

namespace {

// q·q of up to 64 rows fits the integers of float32 (64 * 127² < 2^24), so it may be summed there and added up in float64.
BYTEBACK_INLINE void add_integers(f64* acc, Floats values) {
    const Wide wide = widen(values);
    store(acc, load(acc) + (wide.low + wide.high));
}

// Of integers, so in any order.
inline f64 sum_of_lanes(const f64* acc) {
    f64 sum = 0.0;
    for (int i = 0; i < kLanes / 2; ++i) sum += acc[i];
    return sum;
}

struct Moments {
    using Aside = s32;  // the bits of max|x|, by channel
    static constexpr int vectors = 2;
    static constexpr s64 sums() { return 2; }

    template <int V, class Lanes>
    void columns(const Piece& piece, s64 c, Lanes lanes, f64* acc, s64 padded, s32* aside) const {
        Sums<V> sum(acc), squares(acc + padded);
        Ints peak[V];
        s32* peaks = aside + piece.channel + c;
        for (int v = 0; v < V; ++v) peak[v] = load(peaks + kLanes * v);
        for (s64 row = 0; row < piece.rows; ++row) {
            const f32* from = piece.x + row * piece.x_stride + c;
            piece.fetch_ahead<V>(c, row);
            for (int v = 0; v < V; ++v) {
                const Floats x = lanes.load(from + kLanes * v);
                const Wide wide = lanes.wide(from + kLanes * v, x);
                sum.add(v, wide);
                squares.add_product(v, wide, wide);
                peak[v] = max32(peak[v], magnitude(x));
            }
        }
        sum.save(acc), squares.save(acc + padded);
        for (int v = 0; v < V; ++v) store(peaks + kLanes * v, peak[v]);
    }
};

// x·q and x·x for one live clip, and the same of what lies beyond it. That is little: a first walk through the rows marks those
// that have some, a second one adds them up. Other rows would add zeros. Beyond the clip q = ±127, so x·q = 127 |x|.
struct CosineSlope {
    using Aside = f64;  // q·q, in the lanes of a Doubles
    static constexpr int vectors = 1;
    f32 clip;

    static constexpr s64 sums() { return 4; }

    template <int V, class Lanes>
    void columns(const Piece& piece, s64 c, Lanes lanes, f64* acc, s64 padded, f64* aside) const {
        static_assert(kStatisticsBlock <= 64, "a bit for every row");
        const Floats inverse = all(inverse_scale(clip)), bound = all(clip);
        Sums<V> xq(acc), xx(acc + padded);
        Floats integers[V] = {};
        u64 marked[V] = {};
        for (s64 row = 0; row < piece.rows; ++row) {
            const f32* from = piece.x + row * piece.x_stride + c;
            piece.fetch_ahead<V>(c, row);
            for (int v = 0; v < V; ++v) {
                const Floats x = lanes.load(from + kLanes * v), q = nearest(x * inverse);
                const Wide wide = lanes.wide(from + kLanes * v, x);
                xq.add_product(v, wide, widen(q));
                xx.add_product(v, wide, wide);
                integers[v] = fused(q, q, integers[v]);
                const Mask beyond = greater(absolute(x), bound);
                marked[v] |= static_cast<u64>(any(beyond)) << row;
            }
        }
        xq.save(acc), xx.save(acc + padded);
        for (int v = 0; v < V; ++v) {
            add_integers(aside, integers[v]);
            add_beyond(marked[v], piece, c + kLanes * v, lanes, acc + 2 * padded + kLanes * v, acc + 3 * padded + kLanes * v);
        }
    }

private:
    template <class Lanes>
    void add_beyond(u64 rows, const Piece& piece, s64 c, Lanes lanes, f64* products, f64* squares) const {
        if (!rows) return;
        const Floats bound = all(clip);
        const Wide most{all64(kMax), all64(kMax)};
        Sums<1> xq(products), xx(squares);
        for (; rows; rows &= rows - 1) {
            const Floats size = absolute(lanes.load(piece.x + __builtin_ctzll(rows) * piece.x_stride + c));
            const Wide outer = widen(kept(greater(size, bound), size));
            xq.add_product(0, outer, most);
            xx.add_product(0, outer, outer);
        }
        xq.save(products), xx.save(squares);
    }
};

// x·q, q·q and x·x, for scales that do not vary along a channel.
struct Dot {
    using Aside = f64;
    static constexpr int vectors = 2;
    static constexpr s64 sums() { return 3; }

    template <int V, class Lanes>
    void columns(const Piece& piece, s64 c, Lanes lanes, f64* acc, s64 padded, f64*) const {
        Sums<V> xq(acc), qq(acc + padded), xx(acc + 2 * padded);
        for (s64 row = 0; row < piece.rows; ++row) {
            const f32* from = piece.x + row * piece.x_stride + c;
            piece.fetch_ahead<V>(c, row);
            for (int v = 0; v < V; ++v) {
                const Wide x = lanes.wide(from + kLanes * v, lanes.load(from + kLanes * v));
                const Wide q = lanes.wide(piece.q + row * piece.q_stride + c + kLanes * v);
                xq.add_product(v, x, q);
                qq.add_product(v, q, q);
                xx.add_product(v, x, x);
            }
            piece.fetch_integers_ahead(c, row);
        }
        xq.save(acc), qq.save(acc + padded), xx.save(acc + 2 * padded);
    }
};

// x·x̂, x̂·x̂ and x·x where samples have scales of their own.
struct ScaledDot {
    using Aside = f64;
    static constexpr int vectors = 1;
    static constexpr s64 sums() { return 3; }

    // x̂ has up to 31 bits: its products round, so they may not be fused with the sum.
    static Wide product(const Wide& a, const Wide& b) { return {a.low * b.low, a.high * b.high}; }

    template <int V, class Lanes>
    void columns(const Piece& piece, s64 c, Lanes lanes, f64* acc, s64 padded, f64*) const {
        const Wide scale = widen(load(piece.scale + c));
        Sums<V> dot(acc), rounded_squares(acc + padded), squares(acc + 2 * padded);
        for (s64 row = 0; row < piece.rows; ++row) {
            const f32* from = piece.x + row * piece.x_stride + c;
            piece.fetch_ahead<V>(c, row);
            const Wide x = lanes.wide(from, lanes.load(from));
            const Wide rounded = product(lanes.wide(piece.q + row * piece.q_stride + c), scale);
            dot.add(0, product(x, rounded));
            rounded_squares.add(0, product(rounded, rounded));
            squares.add_product(0, x, x);
        }
        dot.save(acc), rounded_squares.save(acc + padded), squares.save(acc + 2 * padded);
    }
};

}  // namespace

void moments(const Rows& given, const f32* x, f32* peak, f64* sum, f64* squares, int threads) {
    const Source source{merged(given), x, nullptr, {nullptr, 0, 0}};
    const s64 C = source.rows.channels;
    if (C == 0) return;
    std::vector<s32> peaks(round_up(C, kLanes), 0);
    const auto join = [](s32& all, s32 part) { all = part > all ? part : all; };
    const auto totals = ordered_sums(source, Moments{}, threads, peaks, join);
    std::memcpy(peak, peaks.data(), C * sizeof(f32));
    std::memcpy(sum, totals.data(), C * sizeof(f64));
    std::memcpy(squares, totals.data() + C, C * sizeof(f64));
}

void cosine_slope_terms(const Rows& given, const f32* x, f32 clip, f64* terms, int threads) {
    if (!is_live(clip)) return generic::cosine_slope_terms(given, x, clip, terms, threads);
    const Source source{merged(given), x, nullptr, {nullptr, 0, 0}};
    const s64 C = source.rows.channels;
    std::vector<f64> integers(kLanes / 2, 0.0);
    auto totals = ordered_sums(source, CosineSlope{clip}, threads, integers, add_to);
    terms[0] = tree_sum(totals.data(), C);
    terms[1] = sum_of_lanes(integers.data());
    terms[2] = tree_sum(totals.data() + C, C);
    slope_terms(clip, tree_sum(totals.data() + 3 * C, C), tree_sum(totals.data() + 2 * C, C), terms);
}

void dot_terms(const Rows& given, const f32* x, const s8* q, PerScale scale, f64* terms, int threads) {
    const Source source{scale.outer_stride ? given : merged(given), x, q, scale};
    const s64 C = source.rows.channels;
    std::vector<f64> nothing;
    const bool by_channel = scale.outer_stride == 0;
    auto totals = by_channel ? ordered_sums(source, Dot{}, threads, nothing, add_to)
                             : ordered_sums(source, ScaledDot{}, threads, nothing, add_to);
    if (by_channel) scale_dots(scale, C, totals.data(), totals.data() + C);
    for (s64 k = 0; k < 3; ++k) terms[k] = tree_sum(totals.data() + k * C, C);
}

}  // namespace byteback::BYTEBACK_PATH
