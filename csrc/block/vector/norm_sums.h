// SPDX-License-Identifier: Apache-2.0
// The passes of norm.h that gather something for each channel; norm_generic.cpp says the same in plain words.
// Compiled once per path, behind its vectors.
#pragma once

#include <utility>

#include "block/vector/norm_gradient.h"
#include "block/vector/norm_stats.h"

namespace byteback::BYTEBACK_PATH {

namespace {

template <class T>
struct StatsKernel {
    const T* x;
    s64 channels;
    ChannelStats stats;

    StatsKernel(const T* from, s64 all_channels) : x(from), channels(all_channels), stats(channels) {}

    template <int V, class Lanes>
    BYTEBACK_INLINE void columns(const Piece& piece, s64 c, Lanes lanes) {
        const auto fetch = [&](s64 i, int v, Floats) __attribute__((always_inline)) {
            if (v == 0) piece.fetch(x, c, i);
        };
        stats.template columns<V, T>(piece, c, x + piece.row * channels, channels, lanes, fetch);
    }
};

template <Stored stored>
BYTEBACK_INLINE void fetch_kept(const Piece& piece, const Kept& x, s64 c, s64 i) {
    if constexpr (stored == Stored::f32) piece.fetch(static_cast<const f32*>(x.values), c, i);
    if constexpr (stored == Stored::bf16) piece.fetch(static_cast<const bf16*>(x.values), c, i);
    if constexpr (stored == Stored::s8) piece.fetch(static_cast<const s8*>(x.values), c, i);
}

BYTEBACK_INLINE void fetch_stored(const Piece& piece, const void* from, Stored kind, s64 c, s64 i) {
    kind == Stored::bf16 ? piece.fetch(static_cast<const bf16*>(from), c, i) : piece.fetch(static_cast<const f32*>(from), c, i);
}

template <Stored stored, class Lanes>
BYTEBACK_INLINE Wide wide_kept(const Kept& x, s64 at, Floats value, Lanes lanes) {
    if constexpr (stored == Stored::f32) return lanes.wide(static_cast<const f32*>(x.values) + at, value);
    return widen(value);
}

// `squared`: the third sum is wanted.
template <Stored stored, Gate gate, bool squared>
struct GradSumsKernel {
    Backward from;
    void* masked;
    Stored kind;  // of masked
    bool stream;

    GradSumsKernel(const Backward& given, void* to)
        : from(with_constants(given, constants_of(given, 1))), masked(to), kind(masked_kind(given)),
          stream(should_stream(to, kind, from.rows, from.channels)) {}

    template <int V, class Lanes>
    BYTEBACK_INLINE void columns(const Piece& piece, s64 c, Lanes lanes) {
        f64* const last = piece.sums + (squared ? 2 : 1) * piece.padded + c;
        Sums<V> total(piece.sums + c, piece.fresh), dot(piece.sums + piece.padded + c, piece.fresh), squares(last, piece.fresh);
        s64 at = piece.row * from.channels + c, m = piece.row * mask_width(from.channels) + c / 8;
        for (s64 i = 0; i < piece.rows; ++i, at += from.channels, m += mask_width(from.channels)) {
            fetch_stored(piece, from.g, from.g_kind, c, i);
            fetch_kept<stored>(piece, from.x, c, i);
            for (int v = 0; v < V; ++v) {
                const Floats x = kept_value<stored>(from.x, at + kLanes * v, c + kLanes * v, lanes);
                const Floats g = load_stored(from.g, from.g_kind, at + kLanes * v, lanes);
                const Floats gm = gated<gate>(g, x, from, c + kLanes * v, m + kLanes / 8 * v, lanes);
                const Wide wide = widen(gm);
                total.add(v, wide);
                dot.add_product(v, wide, wide_kept<stored>(from.x, at + kLanes * v, x, lanes));
                if constexpr (squared) squares.add_product(v, wide, wide);
                if (masked) store_stored(masked, kind, at + kLanes * v, gm, lanes, stream);
            }
        }
        total.save(piece.sums + c, piece.missing), dot.save(piece.sums + piece.padded + c, piece.missing);
        if constexpr (squared) squares.save(last, piece.missing);
    }
};

// How many of a thread's magnitudes exceed the threshold of their channel, and how many the one of all.
struct Tails {
    std::vector<s64> over_each, over_all;

    explicit Tails(s64 channels) : over_each(round_up(channels, 2 * kLanes), 0), over_all(round_up(channels, 2 * kLanes), 0) {}

    static void add(s64* to, Ints counts) {
        s32 lanes[kLanes];
        store(lanes, counts);
        for (int i = 0; i < kLanes; ++i) to[i] += lanes[i];
    }
};

// V vectors of counts, in registers.
template <int V>
struct TailCounts {
    Ints each[V] = {}, all[V] = {};

    BYTEBACK_INLINE void see(int v, Ints magnitude, const f32* threshold, Floats limit) {
        const Floats size = floats_of(magnitude);
        each[v] = counted(each[v], greater(size, load(threshold)));
        all[v] = counted(all[v], greater(size, limit));
    }
    BYTEBACK_INLINE void save(Tails& to, s64 c) const {
        for (int v = 0; v < V; ++v)
            Tails::add(&to.over_each[c + kLanes * v], each[v]), Tails::add(&to.over_all[c + kLanes * v], all[v]);
    }
};

std::vector<f32> padded(const f32* values, s64 channels) {
    std::vector<f32> result(round_up(channels, 2 * kLanes), 0.0f);
    std::memcpy(result.data(), values, channels * sizeof(f32));
    return result;
}

struct TailKernel {
    const f32* x;
    s64 channels;
    std::vector<f32> each;
    Floats limit;
    Tails tails;

    TailKernel(const f32* from, s64 all_channels, const f32* per_channel, f32 all_of_them)
        : x(from), channels(all_channels), each(padded(per_channel, channels)), limit(all(all_of_them)), tails(channels) {}

    template <int V, class Lanes>
    BYTEBACK_INLINE void columns(const Piece& piece, s64 c, Lanes lanes) {
        TailCounts<V> counts;
        const f32* from = x + piece.row * channels + c;
        for (s64 i = 0; i < piece.rows; ++i, from += channels) {
            piece.fetch(x, c, i);
            for (int v = 0; v < V; ++v)
                counts.see(v, magnitude(lanes.load(from + kLanes * v)), each.data() + c + kLanes * v, limit);
        }
        counts.save(tails, c);
    }
};

template <Stored stored, Gate gate>
struct GradTailsKernel {
    Backward from;
    std::vector<f32> each;
    Floats limit;
    Tails tails;
    std::vector<s32> peak;  // bits of max|dx|

    GradTailsKernel(const Backward& given, const f32* per_channel, f32 all_of_them)
        : from(with_constants(given, constants_of(given, 1))), each(padded(per_channel, given.channels)),
          limit(all(all_of_them)), tails(given.channels), peak(round_up(given.channels, 2 * kLanes), 0) {}

    template <int V, class Lanes>
    BYTEBACK_INLINE void columns(const Piece& piece, s64 c, Lanes lanes) {
        TailCounts<V> counts;
        Ints most[V];
        for (int v = 0; v < V; ++v) most[v] = load(peak.data() + c + kLanes * v);
        s64 at = piece.row * from.channels + c, m = piece.row * mask_width(from.channels) + c / 8;
        for (s64 i = 0; i < piece.rows; ++i, at += from.channels, m += mask_width(from.channels)) {
            fetch_stored(piece, from.g, from.g_kind, c, i);
            fetch_kept<stored>(piece, from.x, c, i);
            for (int v = 0; v < V; ++v) {
                const s64 k = c + kLanes * v;
                const Ints size = magnitude(gradient_of<stored, gate>(from, at + kLanes * v, k, m + kLanes / 8 * v, lanes));
                most[v] = max32(most[v], size);
                counts.see(v, size, each.data() + k, limit);
            }
        }
        counts.save(tails, c);
        for (int v = 0; v < V; ++v) store(peak.data() + c + kLanes * v, most[v]);
    }
};

// The threads' tails, one after the other.
struct JoinedTails {
    size_t width;
    std::vector<s64> each, all;

    JoinedTails(s64 channels, int threads)
        : width(static_cast<size_t>(channels)), each((threads > 1 ? threads : 1) * width, 0), all(each.size(), 0) {}

    void take(int thread, const Tails& tails) {
        std::memcpy(each.data() + thread * width, tails.over_each.data(), width * sizeof(s64));
        std::memcpy(all.data() + thread * width, tails.over_all.data(), width * sizeof(s64));
    }
    void give(s64* over_each, s64* over_all) const {
        for (size_t c = 0; c < width; ++c) {
            over_each[c] = over_all[c] = 0;
            for (size_t i = c; i < each.size(); i += width) over_each[c] += each[i], over_all[c] += all[i];
        }
    }
};

}  // namespace

void channel_stats(s64 rows, s64 channels, const void* x, Stored kind, f64* total, f64* squares, f32* low, f32* high,
                   int threads) {
#ifdef BYTEBACK_NARROWER
    if (is_narrow(channels))
        return BYTEBACK_NARROWER::channel_stats(rows, channels, x, kind, total, squares, low, high, threads);
#endif
    std::vector<ChannelStats> seen(static_cast<size_t>(threads > 1 ? threads : 1), ChannelStats(channels));
    f64* const sums[2] = {total, squares};
    with_real(kind, [&](auto real) {
        using Kernel = StatsKernel<decltype(real)>;
        walk_columns<2>(
            rows, channels, sums, threads, [&] { return Kernel(static_cast<const decltype(real)*>(x), channels); },
            [&](int thread, Kernel& kernel) { seen[static_cast<size_t>(thread)] = std::move(kernel.stats); });
    });
    write_extremes(seen, channels, squares, low, high);
}

void normalize_grad_sums(const Backward& from, f64* total, f64* dot, f64* squares, void* masked, int threads) {
#ifdef BYTEBACK_NARROWER
    if (is_narrow(from.channels)) return BYTEBACK_NARROWER::normalize_grad_sums(from, total, dot, squares, masked, threads);
#endif
    f64* const sums[3] = {total, dot, squares};
    with_backward(from, [&](auto stored, auto gate) {
        const auto walk = [&](auto squared) {
            using Kernel = GradSumsKernel<decltype(stored)::is, decltype(gate)::is, decltype(squared)::is>;
            walk_columns<decltype(squared)::is ? 3 : 2>(
                from.rows, from.channels, sums, threads, [&] { return Kernel(from, masked); }, [](int, const Kernel&) {});
        };
        squares ? walk(Constant<true>{}) : walk(Constant<false>{});
    });
}

void normalize_grad_tails(const Backward& from, const f32* each, f32 all, f32* peak, s64* over_each, s64* over_all,
                          int threads) {
#ifdef BYTEBACK_NARROWER
    if (is_narrow(from.channels))
        return BYTEBACK_NARROWER::normalize_grad_tails(from, each, all, peak, over_each, over_all, threads);
#endif
    const size_t width = static_cast<size_t>(from.channels), most_threads = threads > 1 ? threads : 1;
    std::vector<s32> peaks(most_threads * width, 0);
    JoinedTails tails(from.channels, threads);
    with_backward(from, [&](auto stored, auto gate) {
        using Kernel = GradTailsKernel<decltype(stored)::is, decltype(gate)::is>;
        walk_columns<0>(
            from.rows, from.channels, nullptr, threads, [&] { return Kernel(from, each, all); },
            [&](int thread, const Kernel& kernel) {
                tails.take(thread, kernel.tails);
                std::memcpy(peaks.data() + thread * width, kernel.peak.data(), width * sizeof(s32));
            });
    });
    tails.give(over_each, over_all);
    for (size_t i = width; i < peaks.size(); ++i) peaks[i % width] = peaks[i] > peaks[i % width] ? peaks[i] : peaks[i % width];
    std::memcpy(peak, peaks.data(), width * sizeof(f32));
}

void tail_count_pair(s64 rows, s64 channels, const f32* x, const f32* each, f32 all, s64* over_each, s64* over_all,
                     int threads) {
#ifdef BYTEBACK_NARROWER
    if (is_narrow(channels))
        return BYTEBACK_NARROWER::tail_count_pair(rows, channels, x, each, all, over_each, over_all, threads);
#endif
    JoinedTails tails(channels, threads);
    walk_columns<0>(
        rows, channels, nullptr, threads, [&] { return TailKernel(x, channels, each, all); },
        [&](int thread, const TailKernel& kernel) { tails.take(thread, kernel.tails); });
    tails.give(over_each, over_all);
}

}  // namespace byteback::BYTEBACK_PATH
