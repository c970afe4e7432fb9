// SPDX-License-Identifier: Apache-2.0
// The cosine between a tensor and its integers for several clips, of which a search picks one. The order of additions is the
// contract's (statistics.h says how). Compiled once per path, behind its vectors and its tiles.
#pragma once

#include <cstring>
#include <vector>

#include "elementwise/vector/ordered_sums.h"

namespace byteback::BYTEBACK_PATH {

namespace {

// x·q and q·q for each of `count` candidates and, `with_square`, x·x behind them: [k][x·q, q·q], x·x.
template <bool stochastic>
struct Cosine {
    using Aside = f64;
    static constexpr int vectors = stochastic ? 1 : 2;
    const f32* inverse;  // [k][channels, rounded up to whole vectors]: 127 / clip, 0 for a clip that counts as 0
    s64 stride, count;
    bool with_square;

    s64 sums() const { return 2 * count + with_square; }

    template <int V, class Lanes>
    void columns(const Piece& piece, s64 c, Lanes lanes, f64* acc, s64 padded, f64*) const {
        // The piece stays in the first cache, so every candidate may read it anew.
        if (with_square) square<V>(piece, c, lanes, acc + 2 * count * padded);
        for (s64 k = 0; k < count; ++k) {
            const f32* own = inverse + k * stride + piece.channel + c;
            if constexpr (stochastic)
                expected<V>(piece, c, lanes, own, acc + 2 * k * padded, acc + (2 * k + 1) * padded);
            else
                rounded<V>(piece, c, lanes, own, acc + 2 * k * padded, acc + (2 * k + 1) * padded);
        }
    }

private:
    template <int V, class Lanes>
    static void square(const Piece& piece, s64 c, Lanes lanes, f64* acc) {
        Sums<V> squares(acc);
        for (s64 row = 0; row < piece.rows; ++row) {
            const f32* from = piece.x + row * piece.x_stride + c;
            piece.fetch_ahead<V>(c, row);
            for (int v = 0; v < V; ++v) {
                const Wide wide = lanes.wide(from + kLanes * v, lanes.load(from + kLanes * v));
                squares.add_product(v, wide, wide);
            }
        }
        squares.save(acc);
    }

    // A clip that counts as 0 makes +0 of everything, also of NaN.
    static Floats live(Floats y, Floats rate) { return kept(differ(rate, all(0.0f)), y); }

    template <int V, class Lanes>
    static void rounded(const Piece& piece, s64 c, Lanes lanes, const f32* own, f64* dot_acc, f64* integer_acc) {
        Sums<V> dot(dot_acc), all(integer_acc);
        // q·q of up to 64 rows fits the integers of float32 (64 * 127² < 2^24), so it may be summed there first.
        Floats integers[V] = {}, rate[V];
        for (int v = 0; v < V; ++v) rate[v] = load(own + kLanes * v);
        for (s64 row = 0; row < piece.rows; ++row) {
            const f32* from = piece.x + row * piece.x_stride + c;
            for (int v = 0; v < V; ++v) {
                const Floats x = lanes.load(from + kLanes * v), q = live(nearest(x * rate[v]), rate[v]);
                dot.add_product(v, lanes.wide(from + kLanes * v, x), widen(q));
                integers[v] = fused(q, q, integers[v]);
            }
        }
        for (int v = 0; v < V; ++v) all.add(v, widen(integers[v]));
        dot.save(dot_acc), all.save(integer_acc);
    }

    template <int V, class Lanes>
    static void expected(const Piece& piece, s64 c, Lanes lanes, const f32* own, f64* dot_acc, f64* square_acc) {
        Sums<V> dot(dot_acc), squares(square_acc);
        Floats rate[V];
        for (int v = 0; v < V; ++v) rate[v] = load(own + kLanes * v);
        const Floats most = all(kMax);
        for (s64 row = 0; row < piece.rows; ++row) {
            const f32* from = piece.x + row * piece.x_stride + c;
            for (int v = 0; v < V; ++v) {
                const Floats size = absolute(lanes.load(from + kLanes * v));
                // A NaN stays one.
                const Wide y = widen(live(smaller(most, size * rate[v]), rate[v]));
                dot.add_product(v, widen(size), y);
                squares.add(v, {expected_square(y.low), expected_square(y.high)});
            }
        }
        dot.save(dot_acc), squares.save(square_acc);
    }
};

}  // namespace

void channel_cosine_terms(const Rows& given, const f32* x, CandidateClips clips, bool stochastic, f64* terms, int threads) {
    constexpr s64 kTogether = 8;  // candidates per pass: bounds the scratch memory, and beyond a few a pass is all arithmetic
#ifdef BYTEBACK_NARROWER
    if (is_narrow(given.channels)) return BYTEBACK_NARROWER::channel_cosine_terms(given, x, clips, stochastic, terms, threads);
#endif
    const Source source{merged(given), x, nullptr, {nullptr, 0, 0}};
    const s64 C = source.rows.channels, stride = round_up(C, 2 * kLanes) + 2 * kLanes;
    std::vector<f32> inverse(kTogether * stride, 0.0f);
    std::vector<f64> nothing;
    for (s64 first = 0; first < clips.count; first += kTogether) {
        const s64 some = clips.count - first < kTogether ? clips.count - first : kTogether;
        for (s64 k = 0; k < some; ++k)
            for (s64 c = 0; c < C; ++c) {
                const f32 clip = clips.at(first + k, c, C);
                inverse[k * stride + c] = inverse_or_zero(clip);
            }
        const bool square = first == 0;
        const auto totals =
            stochastic ? ordered_sums(source, Cosine<true>{inverse.data(), stride, some, square}, threads, nothing, add_to)
                       : ordered_sums(source, Cosine<false>{inverse.data(), stride, some, square}, threads, nothing, add_to);
        if (square) std::memcpy(terms + 2 * C, totals.data() + 2 * some * C, C * sizeof(f64));
        for (s64 k = 0; k < some; ++k) {
            f64* own = terms + (first + k) * 3 * C;
            std::memcpy(own, totals.data() + 2 * k * C, 2 * C * sizeof(f64));
            if (first + k) std::memcpy(own + 2 * C, terms + 2 * C, C * sizeof(f64));
        }
    }
}

void cosine_terms(const Rows& rows, const f32* x, CandidateClips clips, bool stochastic, f64* terms, int threads) {
    const s64 C = rows.channels;
    std::vector<f64> sums(clips.count * 3 * C, 0.0);
    channel_cosine_terms(rows, x, clips, stochastic, sums.data(), threads);
    for (s64 i = 0; i < clips.count * 3; ++i) terms[i] = tree_sum(sums.data() + i * C, C);
}

}  // namespace byteback::BYTEBACK_PATH
