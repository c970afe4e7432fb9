// SPDX-License-Identifier: Apache-2.0
// Σ, Σ², min and max of each channel, down the columns of a few rows at a time: for channel_stats, which reads a tensor, and
// for the epilogue that counts rows while they are written. Compiled once per path, behind its vectors.
#pragma once

#include "block/vector/norm_rows.h"

namespace byteback::BYTEBACK_PATH {

namespace {

// What one thread saw. The sums are kept by piece.
struct ChannelStats {
    std::vector<f32> low, high;  // of what is not NaN

    explicit ChannelStats(s64 channels)
        : low(static_cast<size_t>(round_up(channels, 2 * kLanes)), std::numeric_limits<f32>::infinity()),
          high(low.size(), -std::numeric_limits<f32>::infinity()) {}

    // Columns c .. c + kLanes V - 1 of the piece's rows, which lie `pitch` apart from `from` on, rounded to what T holds. For
    // each vector see(row, v, value).
    template <int V, class T, class From, class Lanes, class See>
    BYTEBACK_INLINE void columns(const Piece& piece, s64 c, const From* from, s64 pitch, Lanes lanes, const See& see) {
        Sums<V> total(piece.sums + c, piece.fresh), squares(piece.sums + piece.padded + c, piece.fresh);
        Floats least[V], most[V];
        for (int v = 0; v < V; ++v) {
            least[v] = load(low.data() + c + kLanes * v);
            most[v] = load(high.data() + c + kLanes * v);
        }
        from += c;
        for (s64 i = 0; i < piece.rows; ++i, from += pitch)
            for (int v = 0; v < V; ++v) {
                const Floats given = load_real(from + kLanes * v, lanes);
                const Floats value = std::is_same_v<T, From> ? given : rounded_to<T>(given);
                const Wide wide = std::is_same_v<T, From> ? wide_real(from + kLanes * v, value, lanes) : widen(value);
                total.add(v, wide);
                squares.add_product(v, wide, wide);
                least[v] = smaller(value, least[v]);  // not a NaN
                most[v] = larger(value, most[v]);
                see(i, v, value);
            }
        total.save(piece.sums + c, piece.missing), squares.save(piece.sums + piece.padded + c, piece.missing);
        for (int v = 0; v < V; ++v) {
            store(low.data() + c + kLanes * v, least[v]);
            store(high.data() + c + kLanes * v, most[v]);
        }
    }
};

// The extremes of all threads; `squares` are the sums.
inline void write_extremes(const std::vector<ChannelStats>& threads, s64 channels, const f64* squares, f32* low, f32* high) {
    for (s64 c = 0; c < channels; ++c) {
        f32 least = std::numeric_limits<f32>::infinity(), most = -least;
        for (const ChannelStats& own : threads) {
            const f32 l = own.low[static_cast<size_t>(c)], h = own.high[static_cast<size_t>(c)];
            least = l < least ? l : least;
            most = h > most ? h : most;
        }
        // A sum of squares is NaN only if an element is. Adding +0 leaves one kind of zero.
        const f32 nan = std::numeric_limits<f32>::quiet_NaN();
        low[c] = squares[c] != squares[c] ? nan : least + 0.0f;
        high[c] = squares[c] != squares[c] ? nan : most + 0.0f;
    }
}

}  // namespace

}  // namespace byteback::BYTEBACK_PATH
