// SPDX-License-Identifier: Apache-2.0
// The order of additions of statistics.h and cosine.h: blocks of 64 rows, their halving tree, and packing for other layouts.
//
// A Statistic says how many float64 sums each channel has and how a Piece (rows of one block, channels of one tile) adds to
// them. `ordered_sums` brings the pieces in the right order. Only for statistics.h and cosine.h. Compiled once per path, behind
// its vectors and its tiles (transpose8).
#pragma once

#include <cstring>
#include <vector>

#include "contract_vector.h"
#include "core/parallel.h"
#include "elementwise/rows.h"

namespace byteback::BYTEBACK_PATH {

namespace {

// Some rows of one block by the channels of one tile, channels together.
struct Piece {
    const f32* x;
    s64 x_stride;
    const s8* q;  // q and scale: only for dot_terms
    s64 q_stride;
    const f32* scale;
    s64 rows, channel, width;
    uintptr_t ahead;  // what will be read next, and in which steps it is fetched while channels and rows are walked through
    s64 ahead_channel, ahead_row;

    // Columns are read with large strides, which the hardware does not foresee: V vectors of each row, a line at a time. May
    // lie behind the end: this never faults.
    template <int V>
    BYTEBACK_INLINE void fetch_ahead(s64 c, s64 row) const {
        const uintptr_t next = ahead + c * ahead_channel + row * ahead_row;
        for (size_t byte = 0; byte < V * kLanes * sizeof(f32); byte += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(next + byte), 0, 2);
    }

    // The same for q, which has a quarter of the bytes.
    void fetch_integers_ahead(s64 c, s64 row) const {
        const uintptr_t next = reinterpret_cast<uintptr_t>(q + rows * q_stride);
        __builtin_prefetch(reinterpret_cast<const char*>(next + (c * ahead_channel + row * ahead_row) / 4), 0, 2);
    }
};

struct Source {
    Rows rows;
    const f32* x;
    const s8* q;
    PerScale scale;
};

// ---- packing ---------------------------------------------------------------------------------------------------------

// Fetches the rows of the next block: there are more planes than streams that the hardware can follow. May lie behind the end.
template <class T>
inline void fetch_planes(const T* from, s64 channel_stride, s64 width) {
    const uintptr_t next = reinterpret_cast<uintptr_t>(from + kStatisticsBlock);
    for (s64 c = 0; c < width; ++c)
        for (s64 byte = 0; byte < kStatisticsBlock * static_cast<s64>(sizeof(T)); byte += 64) {
            const uintptr_t at = next + c * channel_stride * sizeof(T) + byte;
            __builtin_prefetch(reinterpret_cast<const char*>(at));
        }
}

// to[row * to_stride + c] = from[row * row_stride + c * channel_stride]
template <class T>
void pack(const T* from, s64 row_stride, s64 channel_stride, s64 rows, s64 width, T* to, s64 to_stride) {
    const s64 whole_rows = row_stride == 1 ? rows / 8 * 8 : 0, whole_width = width / 8 * 8;
    if (row_stride == 1) fetch_planes(from, channel_stride, width);
    for (s64 c = 0; c < whole_width; c += 8)
        for (s64 row = 0; row < whole_rows; row += 8)
            transpose8(from + c * channel_stride + row, channel_stride, to + row * to_stride + c, to_stride);
    for (s64 c = 0; c < width; ++c)
        for (s64 row = c < whole_width ? whole_rows : 0; row < rows; ++row)
            to[row * to_stride + c] = from[row * row_stride + c * channel_stride];
}

// ---- the halving tree ------------------------------------------------------------------------------------------------

inline void add_vector(f64* to, const f64* from, s64 n) {
    for (s64 i = 0; i < n; ++i) to[i] += from[i];
}

// How a tensor is cut into subtrees; all but `blocks` and `tile` are powers of two.
struct Forest {
    s64 blocks;  // blocks of 64 rows
    s64 leaves;  // blocks rounded up to a power of two
    s64 tile;    // channels of a tile
    s64 tiles;
    s64 joint;     // neighbouring subtrees of a unit
    s64 residues;  // subtrees: of the blocks that are equal modulo this number

    explicit Forest(const Rows& rows) : blocks(ceil_div(rows.count(), kStatisticsBlock)), leaves(1) {
        constexpr s64 kWidth = 1024, kUnits = 16;
        while (leaves < blocks) leaves *= 2;
        tile = !rows.channels_last() ? 2 * kLanes : blocks < kUnits ? 64 : 1024;
        tile = rows.channels < tile ? rows.channels : tile;
        tiles = ceil_div(rows.channels, tile);
        for (joint = 1; joint < leaves && 2 * joint * tile <= kWidth;) joint *= 2;
        for (residues = joint; residues < leaves && residues / joint * tiles < kUnits;) residues *= 2;
    }

    s64 padded() const { return round_up(tile, kLanes); }
    s64 units() const { return tiles * (residues / joint); }
};

struct TreeTag {};
struct PackTag {};

// One thread's walk through the subtrees of its units.
template <class Statistic>
class Walker {
public:
    Walker(const Source& source, const Forest& forest, const Statistic& statistic, typename Statistic::Aside* aside)
        : source_(source), forest_(forest), statistic_(statistic), aside_(aside), padded_(forest.padded()) {
        vector_ = statistic.sums() * padded_ * forest.joint;
        s64 levels = 1;
        for (s64 n = forest.leaves / forest.residues; n > 1; n /= 2) ++levels;
        sums_ = reinterpret_cast<f64*>(scratch<TreeTag>(levels * vector_ * sizeof(f64)));
        char* packed = scratch<PackTag>(padded_ * (sizeof(f32) + kStatisticsBlock * (sizeof(f32) + sizeof(s8))));
        packed_x_ = reinterpret_cast<f32*>(packed);
        scale_ = packed_x_ + kStatisticsBlock * padded_;
        packed_q_ = reinterpret_cast<s8*>(scale_ + padded_);
        std::memset(packed, 0, padded_ * sizeof(f32));
    }

    // totals[residue][sum][channel]
    void unit(s64 index, f64* totals) {
        const s64 first = index % (forest_.residues / forest_.joint) * forest_.joint, C = source_.rows.channels;
        channel_ = index / (forest_.residues / forest_.joint) * forest_.tile;
        width_ = C - channel_ < forest_.tile ? C - channel_ : forest_.tile;
        scale_outer_ = -1;
        subtree(first, forest_.residues, sums_);
        for (s64 k = 0; k < forest_.joint; ++k)
            for (s64 sum = 0; sum < statistic_.sums(); ++sum)
                std::memcpy(totals + ((first + k) * statistic_.sums() + sum) * C + channel_,
                            sums_ + (k * statistic_.sums() + sum) * padded_, width_ * sizeof(f64));
    }

private:
    // sums = the sums of blocks first, first + stride, first + 2 stride ..., and so for `joint` neighbours of first.
    void subtree(s64 first, s64 stride, f64* sums) {
        if (first >= forest_.blocks) {
            for (s64 i = 0; i < vector_; ++i) sums[i] = 0.0;
        } else if (stride == forest_.leaves) {
            for (s64 k = 0; k < forest_.joint; ++k) block(first + k, sums + k * statistic_.sums() * padded_);
        } else {
            subtree(first, 2 * stride, sums);
            subtree(first + stride, 2 * stride, sums + vector_);
            add_vector(sums, sums + vector_, vector_);
        }
    }

    void block(s64 index, f64* sums) {
        const s64 n = statistic_.sums() * padded_;
        const s64 missing = (index + 1) * kStatisticsBlock - source_.rows.count();
        // -0 is what addition leaves alone; a block that does not exist is +0.
        for (s64 i = 0; i < n; ++i) sums[i] = index < forest_.blocks ? -0.0 : 0.0;
        if (index >= forest_.blocks) return;
        const s64 end = missing > 0 ? source_.rows.count() : (index + 1) * kStatisticsBlock;
        for (s64 row = index * kStatisticsBlock; row < end;) {
            const s64 o = row / source_.rows.inner, i = row % source_.rows.inner;
            const s64 rows = end - row < source_.rows.inner - i ? end - row : source_.rows.inner - i;
            add(piece(o, i, rows), sums);
            row += rows;
        }
        if (missing > 0)  // missing rows are +0, which makes a sum of -0 positive
            for (s64 i = 0; i < n; ++i) sums[i] += 0.0;
    }

    Piece piece(s64 o, s64 i, s64 n) {
        const Rows& r = source_.rows;
        const s64 at = o * r.outer_stride + i * r.inner_stride + channel_ * r.channel_stride;
        if (source_.q && scale_outer_ != o) {
            for (s64 c = 0; c < width_; ++c) scale_[c] = source_.scale.at(o, channel_ + c);
            scale_outer_ = o;
        }
        const s8* q = source_.q ? source_.q + at : nullptr;
        if (r.channels_last()) return {source_.x + at, r.inner_stride, q, r.inner_stride, scale_, n, channel_, width_, 0, 0, 0};
        pack(source_.x + at, r.inner_stride, r.channel_stride, n, width_, packed_x_, padded_);
        if (q) pack(q, r.inner_stride, r.channel_stride, n, width_, packed_q_, padded_);
        return {packed_x_, padded_, packed_q_, padded_, scale_, n, channel_, width_, 0, 0, 0};
    }

    // A few rows at a time, so that they stay in the first cache while the columns are walked through.
    void add(Piece piece, f64* sums) {
        constexpr int V = Statistic::vectors;
        const s64 all = piece.rows, few = piece.width > 256 ? 8 : 2048 / piece.width;
        for (s64 row = 0; row < all; row += few) {
            piece.rows = all - row < few ? all - row : few;
            plan_fetches(piece, V);
            s64 c = 0;
            for (; c + kLanes * V <= piece.width; c += kLanes * V)
                statistic_.template columns<V>(piece, c, AllLanes{}, sums + c, padded_, aside_);
            for (; c < piece.width; c += kLanes)
                statistic_.template columns<1>(piece, c, FirstLanes(piece.width - c), sums + c, padded_, aside_);
            piece.x += few * piece.x_stride;
            if (piece.q) piece.q += few * piece.q_stride;
        }
    }

    // The rows behind the piece: in the order of memory where they lie together, else below those that are read.
    static void plan_fetches(Piece& piece, int vectors) {
        constexpr s64 size = sizeof(f32);
        const bool dense = piece.x_stride == piece.width;
        piece.ahead = reinterpret_cast<uintptr_t>(piece.x) + piece.rows * piece.x_stride * size;
        piece.ahead_channel = dense ? piece.rows * size : size;
        piece.ahead_row = dense ? kLanes * vectors * size : piece.x_stride * size;
    }

    const Source& source_;
    const Forest& forest_;
    const Statistic& statistic_;
    typename Statistic::Aside* aside_;
    s64 padded_, vector_, channel_ = 0, width_ = 0, scale_outer_ = -1;
    f64* sums_;
    f32* packed_x_;
    s8* packed_q_;
    f32* scale_;
};

inline void add_to(f64& all, f64 part) { all += part; }

// The contract's sums as [sum][channel], at the front of the result (cutting it would instantiate std::vector::resize, which
// the linker could share with the generic path). aside: what needs no order, collected by each thread and then joined.
template <class Statistic, class Aside, class Join>
std::vector<f64> ordered_sums(const Source& source, const Statistic& statistic, int threads, std::vector<Aside>& aside,
                              Join join) {
    const s64 width = statistic.sums() * source.rows.channels;
    if (source.rows.count() * source.rows.channels == 0) return std::vector<f64>(width, 0.0);
    const Forest forest(source.rows);
    threads = useful_threads(threads, source.rows.count() * source.rows.channels);
    threads = threads > 1 ? threads : 1;
    std::vector<f64> totals(forest.residues * width);
    const s64 share = round_up(static_cast<s64>(aside.size()), 16) + 16;  // no two threads write to one cache line
    std::vector<Aside> asides(threads * share, Aside{});
    parallel_ranges(threads, forest.units(), [&](int thread, s64 begin, s64 end) {
        Walker<Statistic> walker(source, forest, statistic, asides.data() + thread * share);
        for (s64 index = begin; index < end; ++index) walker.unit(index, totals.data());
    });
    for (int thread = 0; thread < threads; ++thread)
        for (size_t i = 0; i < aside.size(); ++i) join(aside[i], asides[thread * share + i]);
    add_tree(totals.data(), forest.residues, width, 0, width);
    return totals;
}

}  // namespace

}  // namespace byteback::BYTEBACK_PATH
