// SPDX-License-Identifier: Apache-2.0
// Rows of a product, counted for each channel while they are written: `channel_stats` without its reading.
//
// The contract adds blocks of 64 rows in order. A thread gets most of a block's rows one behind the other, in a few pieces, and
// the block's sums wait in between where they will be wanted at the end. Where a thread's rows begin or end within a block,
// nobody has it whole: such a block is read again.
// Compiled once per path, behind its vectors.
#pragma once

#include "block/epilogue.h"
#include "block/vector/norm_stats.h"

namespace byteback::BYTEBACK_PATH {

namespace {

struct BlockSumsTag {};

// T: f32 or bf16, what is written.
template <class T>
struct State {
    static constexpr s64 kStripBytes = 2 * kLanes * sizeof(T);  // what a row gets at once

    s64 rows, channels, padded;
    T* to;
    bool stream;
    f64* sums;                        // [block][sum][channel]
    std::vector<u8> whole;            // which blocks are counted
    std::vector<ChannelStats> stats;  // of the threads
    std::vector<s64> next;            // the row after those that a thread saw last, if it has counted all of their block

    State(s64 all_rows, s64 all_channels, T* y, size_t threads)
        : rows(all_rows), channels(all_channels), padded(round_up(channels, 2 * kLanes)), to(y),
          stream(kStripBytes % kLineBytes == 0 && should_stream(y, rows, channels, kLineBytes / sizeof(T))),
          sums(reinterpret_cast<f64*>(scratch<BlockSumsTag>(static_cast<size_t>(blocks() * 2 * padded) * sizeof(f64)))),
          whole(static_cast<size_t>(blocks()), 0), stats(threads, ChannelStats(channels)), next(threads, -1) {}

    s64 blocks() const { return ceil_div(rows, kStatisticsBlock); }
    s64 end_of(s64 block) const { return std::min((block + 1) * kStatisticsBlock, rows); }

    // `count` rows of one block, from `row` on, at `from`: counted, and copied where they are not read from `to` itself.
    template <class From>
    void count_rows(size_t thread, s64 row, s64 count, const From* from, bool copies) {
        const s64 block = row / kStatisticsBlock, last = end_of(block);
        const bool missing = row + count == last && last % kStatisticsBlock != 0;
        const Piece piece{row, count, sums + block * 2 * padded, padded, row % kStatisticsBlock == 0, missing, 0};
        ChannelStats& own = stats[thread];
        s64 c = 0;
        for (; c + 2 * kLanes <= channels; c += 2 * kLanes) columns<2>(own, piece, from, c, copies, AllLanes{});
        for (; c + kLanes <= channels; c += kLanes) columns<1>(own, piece, from, c, copies, AllLanes{});
        if (c < channels) columns<1>(own, piece, from, c, copies, FirstLanes(channels - c));
        next[thread] = row + count;
        if (row + count == last) whole[static_cast<size_t>(block)] = 1;
    }

    template <int V, class From, class Lanes>
    BYTEBACK_INLINE void columns(ChannelStats& own, const Piece& piece, const From* from, s64 c, bool copies, Lanes lanes) {
        T* const out = to + piece.row * channels + c;
        const auto copy = [&](s64 i, int v, Floats value) __attribute__((always_inline)) {
            store_real(out + i * channels + kLanes * v, value, lanes, stream);
        };
        const auto leave = [](s64, int, Floats) __attribute__((always_inline)) {};
        if (copies)
            own.template columns<V, T>(piece, c, from, channels, lanes, copy);
        else
            own.template columns<V, T>(piece, c, from, channels, lanes, leave);
    }
};

template <class T>
void take(const Epilogue& all, s64 row, s64 rows, s64, s64, const f32* y) {
    State<T>& state = *static_cast<State<T>*>(all.state);
    const size_t thread = static_cast<size_t>(omp_get_thread_num());
    for (const s64 end = row + rows; row < end;) {
        const s64 count = std::min(state.end_of(row / kStatisticsBlock), end) - row;
        if (row % kStatisticsBlock == 0 || row == state.next[thread])
            state.count_rows(thread, row, count, y, true);
        else
            copy_reals(state.to + row * state.channels, y, count * state.channels);
        row += count;
        y += count * state.channels;
    }
    end_streams();  // behind what was streamed
}

template <class T>
void write_and_count(s64 rows, s64 channels, T* y, const Statistics& to, int threads, void (*body)(const Epilogue&, void*),
                     void* context) {
    State<T> state(rows, channels, y, static_cast<size_t>(threads > 1 ? threads : 1));
    Epilogue epilogue{};
    epilogue.from.rows = rows, epilogue.from.channels = channels;
    epilogue.to.output = y, epilogue.to.pitch = channels;
    epilogue.state = &state, epilogue.in_order = true, epilogue.finish = &take<T>;
    body(epilogue, context);
    for (s64 block = 0; block < state.blocks(); ++block) {
        const s64 first = block * kStatisticsBlock;
        if (!state.whole[static_cast<size_t>(block)])
            state.count_rows(0, first, state.end_of(block) - first, static_cast<const T*>(y) + first * channels, false);
    }
    add_tree(state.sums, state.blocks(), 2 * state.padded, threads);
    std::memcpy(to.total, state.sums, static_cast<size_t>(channels) * sizeof(f64));
    std::memcpy(to.squares, state.sums + state.padded, static_cast<size_t>(channels) * sizeof(f64));
    write_extremes(state.stats, channels, to.squares, to.low, to.high);
}

}  // namespace

void with_statistics(s64 rows, s64 channels, void* y, Stored kind, const Statistics& to, int threads,
                     void (*body)(const Epilogue&, void*), void* context) {
#ifdef BYTEBACK_NARROWER
    if (is_narrow(channels)) return BYTEBACK_NARROWER::with_statistics(rows, channels, y, kind, to, threads, body, context);
#endif
    with_real(kind,
              [&](auto real) { write_and_count(rows, channels, static_cast<decltype(real)*>(y), to, threads, body, context); });
}

}  // namespace byteback::BYTEBACK_PATH
