// SPDX-License-Identifier: Apache-2.0
// The two ways through rows of channels that the fused block's passes (norm.h) take. Compiled once per path, behind its
// vectors.
//
//   walk_rows     in the order of memory, where no order of additions matters. Narrow rows are taken together, a period of
//                 about 512 elements beside which the per-channel constants are laid out.
//   walk_columns  blocks of 64 rows, down the columns: a float64 accumulator stays in its register for many rows. A block's
//                 sums are written out (a sixteenth of what was read) and added as the contract's halving tree at the end.
#pragma once

#include <initializer_list>

#include "block/vector/norm_vector.h"
#include "core/parallel.h"

namespace byteback::BYTEBACK_PATH {

namespace {

struct ConstantsTag {};

// Per-channel vectors in the thread's scratch memory, each repeated for `together` rows and padded for whole vectors.
class Constants {
public:
    Constants(std::initializer_list<const f32*> vectors, s64 channels, s64 together) : room_(channels * together + kBlock) {
        at_ = reinterpret_cast<f32*>(scratch<ConstantsTag>(vectors.size() * room_ * sizeof(f32)));
        f32* to = at_;
        for (const f32* vector : vectors) {
            for (s64 row = 0; vector && row < together; ++row) std::memcpy(to + row * channels, vector, channels * sizeof(f32));
            std::memset(to + channels * together, 0, kBlock * sizeof(f32));
            to += room_;
        }
    }

    f32* operator[](int index) const { return at_ + index * room_; }
    s64 room() const { return room_; }

private:
    s64 room_;
    f32* at_;
};

inline Backward with_constants(Backward from, const Constants& k) {
    from.a = k[0], from.b = k[1], from.p = k[2], from.q = k[3], from.r = k[4], from.x.step = k[5], from.x.centre = k[6];
    return from;
}

inline Constants constants_of(const Backward& from, s64 together) {
    return Constants({from.a, from.b, from.p, from.q, from.r, from.x.step, from.x.centre}, from.channels, together);
}

inline s64 bytes_of(Stored kind) { return kind == Stored::f32 ? 4 : kind == Stored::bf16 ? 2 : 1; }

inline const void* moved(const void* from, Stored kind, s64 elements) {
    return from ? static_cast<const char*>(from) + elements * bytes_of(kind) : nullptr;
}

// z = a * x + b, + residual; from the run's first element on.
template <class Lanes>
BYTEBACK_INLINE Floats forward_z(const Forward& run, s64 e, Floats x, Lanes lanes) {
    const Floats z = load(run.a + e) * x + load(run.b + e);
    if (!run.residual) return z;
    if (run.residual_kind == Stored::f32) return z + lanes.load(static_cast<const f32*>(run.residual) + e);
    if (run.residual_kind == Stored::bf16) return z + load_real(static_cast<const bf16*>(run.residual) + e, lanes);
    const Floats q = to_floats(lanes.ints(static_cast<const s8*>(run.residual) + e));
    return z + q * all(run.residual_scale);
}

// ---- in the order of memory ------------------------------------------------------------------------------------------

struct Periods {
    s64 rows, channels, together, chunk;

    Periods(s64 all_rows, s64 all_channels, bool dense) : rows(all_rows), channels(all_channels), together(1) {
        constexpr s64 kLength = 512;  // elements of a period
        // A mask's bytes and a hash's pairs run on from row to row only if no row ends within them.
        if (dense && channels % 8 == 0 && channels < kLength) together = kLength / channels;
        // Whole blocks where a few rows make them: nothing is left over, and a block starts where it can be streamed.
        const s64 whole = kBlock / greatest_divisor(kBlock, channels);
        if (together > whole) together -= together % whole;
        chunk = round_up(ceil_div(kUnitWork, channels), together);
    }

    s64 units() const { return ceil_div(rows, chunk); }
};

// Each thread makes its kernel (`make(together)`), which then sees every run of its rows: start(row), then block(e) for kBlock
// elements and vector(e, lanes) for what is left over, e counting from the start of the run; at last done(thread, kernel). Rows
// that are not `dense` in every tensor are taken one by one.
template <class Make, class Done>
void walk_rows(s64 rows, s64 channels, int threads, const Make& make, const Done& done, bool dense = true) {
    const Periods periods(rows, channels, dense);
    parallel_shares(useful_threads(threads, rows * channels), periods.units(), [&](int thread, const auto& next) {
        auto kernel = make(periods.together);
        for (s64 begin, end; next(begin, end);) {
            const s64 last = end * periods.chunk < rows ? end * periods.chunk : rows;
            for (s64 row = begin * periods.chunk; row < last; row += periods.together) {
                const s64 n = (last - row < periods.together ? last - row : periods.together) * channels;
                kernel.start(row);
                s64 e = 0;
                for (; e + kBlock <= n; e += kBlock) kernel.block(e);
                for (; e + kLanes <= n; e += kLanes) kernel.vector(e, AllLanes{});
                if (e < n) kernel.vector(e, FirstLanes(n - e));
            }
        }
        end_streams();  // behind what was streamed
        done(thread, kernel);
    });
}

inline std::vector<Report> no_reports(int threads) {
    return std::vector<Report>(threads > 1 ? threads : 1, Report{0, 0, 0.0f});
}

// ---- down the columns ------------------------------------------------------------------------------------------------

// A few rows of one block.
struct Piece {
    s64 row, rows;
    f64* sums;  // [sum][channel], padded to whole vectors
    s64 padded;
    bool fresh;    // the block's first rows
    bool missing;  // the block's last rows, if it has fewer than 64
    s64 ahead;     // element that follows the piece

    // What will be read next, the width of a strip of channels for each row and strip, in the order of memory: down the columns
    // the hardware cannot foresee it. May lie behind the end: this never faults.
    template <class T>
    BYTEBACK_INLINE void fetch(const T* base, s64 c, s64 i) const {
        constexpr s64 kLine = 64, bytes = 2 * kLanes * sizeof(T);
        if (bytes < kLine && i % (kLine / bytes)) return;
        const uintptr_t at = reinterpret_cast<uintptr_t>(base) + (ahead + c * rows) * sizeof(T) + i * bytes;
        for (s64 byte = 0; byte < bytes; byte += kLine) __builtin_prefetch(reinterpret_cast<const char*>(at + byte), 0, 2);
    }
};

struct SumsTag {};

// add_tree of all columns, by several threads.
inline void add_tree(f64* values, s64 count, s64 width, int threads) {
    parallel_ranges(useful_threads(threads, count * width), ceil_div(width, 64), [&](int, s64 begin, s64 end) {
        byteback::add_tree(values, count, width, begin * 64, end * 64 < width ? end * 64 : width);
    });
}

// kernel.columns<V>(piece, c, lanes) for all columns of all blocks; sums[k] gets the ordered sums of the channels.
template <int sum_count, class Make, class Done>
void walk_columns(s64 rows, s64 channels, f64* const* sums, int threads, const Make& make, const Done& done) {
    constexpr s64 kPiece = 1 << 14;  // elements: a piece and the next one stay in the second cache
    const s64 blocks = ceil_div(rows, kStatisticsBlock), padded = round_up(channels, 2 * kLanes), width = sum_count * padded;
    const s64 some = kPiece / channels, few = some < 4 ? 4 : some < kStatisticsBlock ? some : kStatisticsBlock;
    // Few blocks are cut into tiles of channels as well, or a thread would go without work.
    s64 tile = padded;
    while (blocks * ceil_div(padded, tile) < 8 && tile > 64) tile = round_up(tile / 2, 2 * kLanes);
    const s64 tiles = ceil_div(channels, tile);
    f64* all = reinterpret_cast<f64*>(scratch<SumsTag>(blocks * width * sizeof(f64)));
    const auto walk_block = [&](auto& kernel, s64 index) {
        const s64 block = index / tiles, from = index % tiles * tile, to = from + tile < channels ? from + tile : channels;
        const s64 first = block * kStatisticsBlock;
        const s64 last = first + kStatisticsBlock < rows ? first + kStatisticsBlock : rows;
        for (s64 row = first; row < last; row += few) {
            const s64 n = last - row < few ? last - row : few;
            const bool missing = row + n == last && last - first < kStatisticsBlock;
            const Piece piece{row, n, all + block * width, padded, row == first, missing, (row + n) * channels};
            s64 c = from;
            for (; c + 2 * kLanes <= to; c += 2 * kLanes) kernel.template columns<2>(piece, c, AllLanes{});
            for (; c + kLanes <= to; c += kLanes) kernel.template columns<1>(piece, c, AllLanes{});
            if (c < to) kernel.template columns<1>(piece, c, FirstLanes(to - c));
        }
    };
    parallel_shares(useful_threads(threads, rows * channels), blocks * tiles, [&](int thread, const auto& next) {
        auto kernel = make();
        for (s64 begin, end; next(begin, end);)
            for (s64 index = begin; index < end; ++index) walk_block(kernel, index);
        end_streams();  // behind what was streamed
        done(thread, kernel);
    });
    if (sum_count == 0) return;
    add_tree(all, blocks, width, threads);
    for (int k = 0; k < sum_count; ++k) std::memcpy(sums[k], all + k * padded, channels * sizeof(f64));
}

}  // namespace

}  // namespace byteback::BYTEBACK_PATH
