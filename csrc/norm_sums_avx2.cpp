// SPDX-License-Identifier: Apache-2.0
// The passes of norm.h that gather something for each channel; norm_generic.cpp says the same in plain words.
#include <immintrin.h>

#include "avx2.h"
#include "norm_rows_avx2.h"

namespace byteback::avx2 {

namespace {

struct StatsKernel {
    const f32* x;
    s64 channels;
    std::vector<f32> low, high;  // of what is not NaN

    StatsKernel(const f32* from, s64 all_channels)
        : x(from), channels(all_channels), low(round_up(channels, 16), std::numeric_limits<f32>::infinity()),
          high(round_up(channels, 16), -std::numeric_limits<f32>::infinity()) {}

    template <int V, class Lanes>
    BYTEBACK_INLINE void columns(const Piece& piece, s64 c, Lanes lanes) {
        Sums<V> total(piece.sums + c, piece.fresh), squares(piece.sums + piece.padded + c, piece.fresh);
        __m256 least[V], most[V];
        for (int v = 0; v < V; ++v) {
            least[v] = _mm256_loadu_ps(low.data() + c + 8 * v);
            most[v] = _mm256_loadu_ps(high.data() + c + 8 * v);
        }
        const f32* from = x + piece.row * channels + c;
        for (s64 i = 0; i < piece.rows; ++i, from += channels) {
            piece.fetch(x, c, i);
            for (int v = 0; v < V; ++v) {
                const __m256 value = lanes.load(from + 8 * v);
                const Wide wide = lanes.wide(from + 8 * v, value);
                total.add(v, wide);
                squares.add_product(v, wide, wide);
                least[v] = _mm256_min_ps(value, least[v]);  // the second operand if one is NaN
                most[v] = _mm256_max_ps(value, most[v]);
            }
        }
        total.save(piece.sums + c, piece.missing), squares.save(piece.sums + piece.padded + c, piece.missing);
        for (int v = 0; v < V; ++v) {
            _mm256_storeu_ps(low.data() + c + 8 * v, least[v]);
            _mm256_storeu_ps(high.data() + c + 8 * v, most[v]);
        }
    }
};

template <Stored stored>
BYTEBACK_INLINE void fetch_kept(const Piece& piece, const Kept& x, s64 c, s64 i) {
    if constexpr (stored == Stored::f32) piece.fetch(static_cast<const f32*>(x.values), c, i);
    if constexpr (stored == Stored::bf16) piece.fetch(static_cast<const u16*>(x.values), c, i);
    if constexpr (stored == Stored::s8) piece.fetch(static_cast<const s8*>(x.values), c, i);
}

template <Stored stored, class Lanes>
BYTEBACK_INLINE Wide wide_kept(const Kept& x, s64 at, __m256 value, Lanes lanes) {
    if constexpr (stored == Stored::f32) return lanes.wide(static_cast<const f32*>(x.values) + at, value);
    return widen(value);
}

template <Stored stored, Gate gate>
struct GradSumsKernel {
    Backward from;
    f32* masked;
    bool stream;

    GradSumsKernel(const Backward& given, f32* to)
        : from(with_constants(given, constants_of(given, 1))), masked(to),
          stream(should_stream(to, from.rows, from.channels, 16)) {}

    template <int V, class Lanes>
    BYTEBACK_INLINE void columns(const Piece& piece, s64 c, Lanes lanes) {
        Sums<V> total(piece.sums + c, piece.fresh), dot(piece.sums + piece.padded + c, piece.fresh);
        s64 at = piece.row * from.channels + c, m = piece.row * mask_width(from.channels) + c / 8;
        for (s64 i = 0; i < piece.rows; ++i, at += from.channels, m += mask_width(from.channels)) {
            piece.fetch(from.g, c, i);
            fetch_kept<stored>(piece, from.x, c, i);
            for (int v = 0; v < V; ++v) {
                const __m256 x = kept_value<stored>(from.x, at + 8 * v, c + 8 * v, lanes);
                const __m256 gm = gated<gate>(lanes.load(from.g + at + 8 * v), x, from, c + 8 * v, m + v);
                const Wide wide = widen(gm);
                total.add(v, wide);
                dot.add_product(v, wide, wide_kept<stored>(from.x, at + 8 * v, x, lanes));
                if (masked) put(masked + at + 8 * v, gm, stream, lanes);
            }
        }
        total.save(piece.sums + c, piece.missing), dot.save(piece.sums + piece.padded + c, piece.missing);
    }
};

template <Stored stored, Gate gate>
struct GradMomentsKernel {
    Backward from;
    f32* dx;
    bool stream;
    std::vector<s32> peak;  // bits of max|dx|

    GradMomentsKernel(const Backward& given, f32* to)
        : from(with_constants(given, constants_of(given, 1))), dx(to),
          stream(should_stream(to, from.rows, from.channels, 16)), peak(round_up(given.channels, 16), 0) {}

    template <int V, class Lanes>
    BYTEBACK_INLINE void columns(const Piece& piece, s64 c, Lanes lanes) {
        Sums<V> total(piece.sums + c, piece.fresh), squares(piece.sums + piece.padded + c, piece.fresh);
        __m256i most[V];
        for (int v = 0; v < V; ++v) most[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(peak.data() + c + 8 * v));
        s64 at = piece.row * from.channels + c, m = piece.row * mask_width(from.channels) + c / 8;
        for (s64 i = 0; i < piece.rows; ++i, at += from.channels, m += mask_width(from.channels)) {
            piece.fetch(from.g, c, i);
            fetch_kept<stored>(piece, from.x, c, i);
            for (int v = 0; v < V; ++v) {
                const s64 k = c + 8 * v;
                const __m256 x = kept_value<stored>(from.x, at + 8 * v, k, lanes);
                const __m256 gm = gated<gate>(lanes.load(from.g + at + 8 * v), x, from, k, m + v);
                const __m256 from_g = _mm256_mul_ps(_mm256_loadu_ps(from.p + k), gm);
                const __m256 from_x = _mm256_mul_ps(_mm256_loadu_ps(from.q + k), x);
                const __m256 value = _mm256_add_ps(_mm256_add_ps(from_g, from_x), _mm256_loadu_ps(from.r + k));
                const Wide wide = widen(value);
                total.add(v, wide);
                squares.add_product(v, wide, wide);
                most[v] = _mm256_max_epi32(most[v], magnitude(value));
                put(dx + at + 8 * v, value, stream, lanes);
            }
        }
        total.save(piece.sums + c, piece.missing), squares.save(piece.sums + piece.padded + c, piece.missing);
        for (int v = 0; v < V; ++v) _mm256_storeu_si256(reinterpret_cast<__m256i*>(peak.data() + c + 8 * v), most[v]);
    }
};

struct TailKernel {
    const f32* x;
    s64 channels;
    const f32* each;
    __m256 limit;
    std::vector<s64> over_each, over_all;

    TailKernel(const f32* from, s64 all_channels, const f32* per_channel, f32 all_of_them)
        : x(from), channels(all_channels), each(Constants({per_channel}, channels, 1)[0]), limit(all(all_of_them)),
          over_each(round_up(channels, 16), 0), over_all(round_up(channels, 16), 0) {}

    static void add(s64* to, __m256i counts) {
        alignas(32) s32 lanes[8];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), counts);
        for (int i = 0; i < 8; ++i) to[i] += lanes[i];
    }

    template <int V, class Lanes>
    BYTEBACK_INLINE void columns(const Piece& piece, s64 c, Lanes lanes) {
        __m256i first[V] = {}, second[V] = {};
        const f32* from = x + piece.row * channels + c;
        for (s64 i = 0; i < piece.rows; ++i, from += channels) {
            piece.fetch(x, c, i);
            for (int v = 0; v < V; ++v) {
                const __m256 size = _mm256_castsi256_ps(magnitude(lanes.load(from + 8 * v)));
                const __m256 over = _mm256_cmp_ps(size, _mm256_loadu_ps(each + c + 8 * v), _CMP_GT_OQ);
                first[v] = _mm256_sub_epi32(first[v], _mm256_castps_si256(over));
                second[v] = _mm256_sub_epi32(second[v], _mm256_castps_si256(_mm256_cmp_ps(size, limit, _CMP_GT_OQ)));
            }
        }
        for (int v = 0; v < V; ++v) add(&over_each[c + 8 * v], first[v]), add(&over_all[c + 8 * v], second[v]);
    }
};

}  // namespace

void channel_stats(s64 rows, s64 channels, const f32* x, f64* total, f64* squares, f32* low, f32* high, int threads) {
    const size_t width = static_cast<size_t>(channels), most_threads = threads > 1 ? threads : 1;
    std::vector<f32> lows(most_threads * width, std::numeric_limits<f32>::infinity());
    std::vector<f32> highs(most_threads * width, -std::numeric_limits<f32>::infinity());
    f64* const sums[2] = {total, squares};
    walk_columns<2>(
        rows, channels, sums, threads, [&] { return StatsKernel(x, channels); },
        [&](int thread, const StatsKernel& kernel) {
            std::memcpy(lows.data() + thread * width, kernel.low.data(), width * sizeof(f32));
            std::memcpy(highs.data() + thread * width, kernel.high.data(), width * sizeof(f32));
        });
    for (size_t c = 0; c < width; ++c) {
        f32 least = lows[c], most = highs[c];
        for (size_t i = c; i < lows.size(); i += width) {
            least = lows[i] < least ? lows[i] : least;
            most = highs[i] > most ? highs[i] : most;
        }
        // A sum of squares is NaN only if an element is. Adding +0 leaves one kind of zero.
        const f32 nan = std::numeric_limits<f32>::quiet_NaN();
        low[c] = squares[c] != squares[c] ? nan : least + 0.0f;
        high[c] = squares[c] != squares[c] ? nan : most + 0.0f;
    }
}

void normalize_grad_sums(const Backward& from, f64* total, f64* dot, f32* masked, int threads) {
    f64* const sums[2] = {total, dot};
    with_backward(from, [&](auto stored, auto gate) {
        using Kernel = GradSumsKernel<decltype(stored)::is, decltype(gate)::is>;
        walk_columns<2>(
            from.rows, from.channels, sums, threads, [&] { return Kernel(from, masked); }, [](int, const Kernel&) {});
    });
}

void normalize_grad_moments(const Backward& from, f32* dx, f32* peak, f64* total, f64* squares, int threads) {
    const size_t width = static_cast<size_t>(from.channels), most_threads = threads > 1 ? threads : 1;
    std::vector<s32> peaks(most_threads * width, 0);
    f64* const sums[2] = {total, squares};
    with_backward(from, [&](auto stored, auto gate) {
        using Kernel = GradMomentsKernel<decltype(stored)::is, decltype(gate)::is>;
        walk_columns<2>(
            from.rows, from.channels, sums, threads, [&] { return Kernel(from, dx); },
            [&](int thread, const Kernel& kernel) {
                std::memcpy(peaks.data() + thread * width, kernel.peak.data(), width * sizeof(s32));
            });
    });
    for (size_t i = width; i < peaks.size(); ++i)
        peaks[i % width] = peaks[i] > peaks[i % width] ? peaks[i] : peaks[i % width];
    std::memcpy(peak, peaks.data(), width * sizeof(f32));
}

void tail_count_pair(s64 rows, s64 channels, const f32* x, const f32* each, f32 all, s64* over_each, s64* over_all,
                     int threads) {
    const size_t width = static_cast<size_t>(channels), most_threads = threads > 1 ? threads : 1;
    std::vector<s64> first(most_threads * width, 0), second(most_threads * width, 0);
    walk_columns<0>(
        rows, channels, nullptr, threads, [&] { return TailKernel(x, channels, each, all); },
        [&](int thread, const TailKernel& kernel) {
            std::memcpy(first.data() + thread * width, kernel.over_each.data(), width * sizeof(s64));
            std::memcpy(second.data() + thread * width, kernel.over_all.data(), width * sizeof(s64));
        });
    for (size_t c = 0; c < width; ++c) {
        over_each[c] = over_all[c] = 0;
        for (size_t i = c; i < first.size(); i += width) over_each[c] += first[i], over_all[c] += second[i];
    }
}

}  // namespace byteback::avx2
