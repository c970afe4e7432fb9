// SPDX-License-Identifier: Apache-2.0
// Rows of a product on their way to memory, counted for each channel: `channel_stats` without its reading.
//
// The contract adds blocks of 64 rows in order. A thread gets most of a block's rows one behind the other, in a few pieces, and
// the block's sums wait in between where they will be wanted at the end. Where a thread's rows begin or end within a block,
// nobody has it whole: such a block is read again.
#include <immintrin.h>

#include "epilogue.h"
#include "norm_rows_avx2.h"

namespace byteback::avx2 {

namespace {

struct Own {
    std::vector<f32> low, high;  // of what is not NaN
    s64 next = -1;               // the row after those that the thread saw last, if it has counted all of their block

    explicit Own(s64 padded)
        : low(static_cast<size_t>(padded), std::numeric_limits<f32>::infinity()),
          high(static_cast<size_t>(padded), -std::numeric_limits<f32>::infinity()) {}
};

struct BlockSumsTag {};

struct State {
    s64 rows, channels, padded;
    f32* to;
    bool stream;
    f64* sums;              // [block][sum][channel]
    std::vector<u8> whole;  // which blocks are counted
    std::vector<Own> owns;  // of the threads

    State(s64 all_rows, s64 all_channels, f32* y, int threads)
        : rows(all_rows), channels(all_channels), padded(round_up(channels, 16)), to(y),
          stream(should_stream(y, rows, channels, 16)),
          sums(reinterpret_cast<f64*>(scratch<BlockSumsTag>(static_cast<size_t>(blocks() * 2 * padded) * sizeof(f64)))),
          whole(static_cast<size_t>(blocks()), 0),
          owns(static_cast<size_t>(threads > 1 ? threads : 1), Own(padded)) {}

    s64 blocks() const { return ceil_div(rows, kStatisticsBlock); }
    s64 end_of(s64 block) const { return std::min((block + 1) * kStatisticsBlock, rows); }

    // `count` rows of one block, from `row` on, at `from`: counted, and copied where `copies` says so.
    template <bool copies>
    void count_rows(Own& own, s64 row, s64 count, const f32* from) {
        const s64 block = row / kStatisticsBlock, last = end_of(block);
        const bool missing = row + count == last && last % kStatisticsBlock != 0;
        const Piece piece{row, count, sums + block * 2 * padded, padded, row % kStatisticsBlock == 0, missing, 0};
        s64 c = 0;
        for (; c + 16 <= channels; c += 16) columns<2, copies>(own, piece, from, c, AllLanes{});
        for (; c + 8 <= channels; c += 8) columns<1, copies>(own, piece, from, c, AllLanes{});
        if (c < channels) columns<1, copies>(own, piece, from, c, FirstLanes(channels - c));
        own.next = row + count;
        if (own.next == last) whole[static_cast<size_t>(block)] = 1;
    }

    template <int V, bool copies, class Lanes>
    BYTEBACK_INLINE void columns(Own& own, const Piece& piece, const f32* from, s64 c, Lanes lanes) {
        Sums<V> total(piece.sums + c, piece.fresh), squares(piece.sums + piece.padded + c, piece.fresh);
        __m256 least[V], most[V];
        for (int v = 0; v < V; ++v) {
            least[v] = _mm256_loadu_ps(own.low.data() + c + 8 * v);
            most[v] = _mm256_loadu_ps(own.high.data() + c + 8 * v);
        }
        f32* out = to + piece.row * channels + c;
        from += c;
        for (s64 i = 0; i < piece.rows; ++i, from += channels, out += channels)
            for (int v = 0; v < V; ++v) {
                const __m256 value = lanes.load(from + 8 * v);
                const Wide wide = lanes.wide(from + 8 * v, value);
                total.add(v, wide);
                squares.add_product(v, wide, wide);
                least[v] = _mm256_min_ps(value, least[v]);  // the second operand if one is NaN
                most[v] = _mm256_max_ps(value, most[v]);
                if constexpr (copies) put(out + 8 * v, value, stream, lanes);
            }
        total.save(piece.sums + c, piece.missing), squares.save(piece.sums + piece.padded + c, piece.missing);
        for (int v = 0; v < V; ++v) {
            _mm256_storeu_ps(own.low.data() + c + 8 * v, least[v]);
            _mm256_storeu_ps(own.high.data() + c + 8 * v, most[v]);
        }
    }
};

void take(const Epilogue& all, s64 row, s64 rows, s64, s64, const f32* y) {
    State& state = *static_cast<State*>(all.state);
    Own& own = state.owns[static_cast<size_t>(omp_get_thread_num())];
    for (const s64 end = row + rows; row < end;) {
        const s64 count = std::min(state.end_of(row / kStatisticsBlock), end) - row;
        if (row % kStatisticsBlock == 0 || row == own.next)
            state.count_rows<true>(own, row, count, y);
        else
            std::memcpy(state.to + row * state.channels, y, static_cast<size_t>(count * state.channels) * sizeof(f32));
        row += count;
        y += count * state.channels;
    }
    _mm_sfence();  // behind what was streamed
}

}  // namespace

void with_statistics(s64 rows, s64 channels, f32* y, const Statistics& to, int threads, void (*body)(const Epilogue&, void*),
                     void* context) {
    State state(rows, channels, y, threads);
    Epilogue epilogue{};
    epilogue.from.rows = rows, epilogue.from.channels = channels;
    epilogue.to.output = y, epilogue.to.pitch = channels;
    epilogue.state = &state, epilogue.in_order = true, epilogue.finish = &take;
    body(epilogue, context);
    for (s64 block = 0; block < state.blocks(); ++block) {
        const s64 first = block * kStatisticsBlock;
        if (!state.whole[static_cast<size_t>(block)])
            state.count_rows<false>(state.owns[0], first, state.end_of(block) - first, y + first * channels);
    }
    add_tree(state.sums, state.blocks(), 2 * state.padded, threads);
    std::memcpy(to.total, state.sums, static_cast<size_t>(channels) * sizeof(f64));
    std::memcpy(to.squares, state.sums + state.padded, static_cast<size_t>(channels) * sizeof(f64));
    for (s64 c = 0; c < channels; ++c) {
        f32 least = std::numeric_limits<f32>::infinity(), most = -least;
        for (const Own& own : state.owns) {
            least = own.low[static_cast<size_t>(c)] < least ? own.low[static_cast<size_t>(c)] : least;
            most = own.high[static_cast<size_t>(c)] > most ? own.high[static_cast<size_t>(c)] : most;
        }
        // A product of integers is never NaN, but its scale may be. Adding +0 leaves one kind of zero.
        const f32 nan = std::numeric_limits<f32>::quiet_NaN();
        to.low[c] = to.squares[c] != to.squares[c] ? nan : least + 0.0f;
        to.high[c] = to.squares[c] != to.squares[c] ? nan : most + 0.0f;
    }
}

}  // namespace byteback::avx2
