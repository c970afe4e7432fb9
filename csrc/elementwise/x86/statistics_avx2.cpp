// SPDX-License-Identifier: Apache-2.0
// The float64 sums: moments, the cosine of a clip and its slope, the dot products of a tensor and its integers.
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
// A clip that counts as 0 gives nothing to search in: the generic path serves it.
// Fused multiply-adds appear only where the product is exact in float64, so that they round where the reference does.
#include <immintrin.h>

#include <cstring>
#include <vector>

#include "core/avx2.h"
#include "core/generic.h"
#include "core/parallel.h"
#include "elementwise/rows.h"
#include "elementwise/x86/statistics_avx2.h"

namespace byteback::avx2 {

namespace {

// Four sums of float64 for each of V vectors of floats: two registers a vector.
template <int V>
struct Sums {
    __m256d part[2 * V];

    explicit Sums(const f64* acc) {
        for (int i = 0; i < 2 * V; ++i) part[i] = _mm256_loadu_pd(acc + 4 * i);
    }
    void save(f64* acc) const {
        for (int i = 0; i < 2 * V; ++i) _mm256_storeu_pd(acc + 4 * i, part[i]);
    }
    void add(int v, const Wide& x) {
        part[2 * v] = _mm256_add_pd(part[2 * v], x.low);
        part[2 * v + 1] = _mm256_add_pd(part[2 * v + 1], x.high);
    }
    // Only for products that float64 holds exactly.
    void add_product(int v, const Wide& a, const Wide& b) {
        part[2 * v] = _mm256_fmadd_pd(a.low, b.low, part[2 * v]);
        part[2 * v + 1] = _mm256_fmadd_pd(a.high, b.high, part[2 * v + 1]);
    }
};

// y clamped and rounded to nearest; -0 and NaN stay what they are (max and min return their second operand if one is NaN).
inline __m256 nearest(__m256 y) {
    y = _mm256_min_ps(_mm256_set1_ps(127.0f), _mm256_max_ps(_mm256_set1_ps(-127.0f), y));
    return _mm256_round_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// q·q of up to 64 rows fits the integers of float32 (64 * 127² < 2^24), so it may be summed there and added up in float64.
inline void add_integers(f64* acc, __m256 values) {
    const Wide wide = widen(values);
    _mm256_storeu_pd(acc, _mm256_add_pd(_mm256_loadu_pd(acc), _mm256_add_pd(wide.low, wide.high)));
}

inline f64 lanes_of(const f64* acc) { return (acc[0] + acc[1]) + (acc[2] + acc[3]); }

struct Moments {
    using Aside = s32;  // the bits of max|x|, by channel
    static constexpr int vectors = 2;
    static constexpr s64 sums() { return 2; }

    template <int V, class Lanes>
    void columns(const Piece& piece, s64 c, Lanes lanes, f64* acc, s64 padded, s32* aside) const {
        Sums<V> sum(acc), squares(acc + padded);
        __m256i peak[V];
        s32* peaks = aside + piece.channel + c;
        for (int v = 0; v < V; ++v) peak[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(peaks + 8 * v));
        const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
        for (s64 row = 0; row < piece.rows; ++row) {
            const f32* from = piece.x + row * piece.x_stride + c;
            piece.fetch_ahead(c, row);
            for (int v = 0; v < V; ++v) {
                const __m256 x = lanes.load(from + 8 * v);
                const Wide wide = lanes.wide(from + 8 * v, x);
                sum.add(v, wide);
                squares.add_product(v, wide, wide);
                peak[v] = _mm256_max_epi32(peak[v], _mm256_and_si256(_mm256_castps_si256(x), magnitude));
            }
        }
        sum.save(acc), squares.save(acc + padded);
        for (int v = 0; v < V; ++v) _mm256_storeu_si256(reinterpret_cast<__m256i*>(peaks + 8 * v), peak[v]);
    }
};

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
            piece.fetch_ahead(c, row);
            for (int v = 0; v < V; ++v) {
                const Wide wide = lanes.wide(from + 8 * v, lanes.load(from + 8 * v));
                squares.add_product(v, wide, wide);
            }
        }
        squares.save(acc);
    }

    // A clip that counts as 0 makes +0 of everything, also of NaN.
    static __m256 live(__m256 y, __m256 rate) { return _mm256_and_ps(y, _mm256_cmp_ps(rate, _mm256_setzero_ps(), _CMP_NEQ_OQ)); }

    template <int V, class Lanes>
    static void rounded(const Piece& piece, s64 c, Lanes lanes, const f32* own, f64* dot_acc, f64* integer_acc) {
        Sums<V> dot(dot_acc), all(integer_acc);
        // q·q of up to 64 rows fits the integers of float32 (64 * 127² < 2^24), so it may be summed there first.
        __m256 integers[V] = {}, rate[V];
        for (int v = 0; v < V; ++v) rate[v] = _mm256_loadu_ps(own + 8 * v);
        for (s64 row = 0; row < piece.rows; ++row) {
            const f32* from = piece.x + row * piece.x_stride + c;
            for (int v = 0; v < V; ++v) {
                const __m256 x = lanes.load(from + 8 * v), q = live(nearest(_mm256_mul_ps(x, rate[v])), rate[v]);
                dot.add_product(v, lanes.wide(from + 8 * v, x), widen(q));
                integers[v] = _mm256_fmadd_ps(q, q, integers[v]);
            }
        }
        for (int v = 0; v < V; ++v) all.add(v, widen(integers[v]));
        dot.save(dot_acc), all.save(integer_acc);
    }

    template <int V, class Lanes>
    static void expected(const Piece& piece, s64 c, Lanes lanes, const f32* own, f64* dot_acc, f64* square_acc) {
        Sums<V> dot(dot_acc), squares(square_acc);
        __m256 rate[V];
        for (int v = 0; v < V; ++v) rate[v] = _mm256_loadu_ps(own + 8 * v);
        const __m256 most = _mm256_set1_ps(kMax), sign = _mm256_set1_ps(-0.0f);
        for (s64 row = 0; row < piece.rows; ++row) {
            const f32* from = piece.x + row * piece.x_stride + c;
            for (int v = 0; v < V; ++v) {
                const __m256 size = _mm256_andnot_ps(sign, lanes.load(from + 8 * v));
                // min returns its second operand if one is NaN
                const Wide y = widen(live(_mm256_min_ps(most, _mm256_mul_ps(size, rate[v])), rate[v]));
                dot.add_product(v, widen(size), y);
                squares.add(v, {expected_square(y.low), expected_square(y.high)});
            }
        }
        dot.save(dot_acc), squares.save(square_acc);
    }

    // n² + f (2n + 1) for y = n + f: both steps are exact.
    static __m256d expected_square(__m256d y) {
        const __m256d n = _mm256_floor_pd(y), one = _mm256_set1_pd(1.0);
        return _mm256_fmadd_pd(_mm256_sub_pd(y, n), _mm256_fmadd_pd(_mm256_set1_pd(2.0), n, one), _mm256_mul_pd(n, n));
    }
};

// x·q and x·x for one live clip, and the same of what lies beyond it. That is little: a first walk through the rows marks those
// that have some, a second one adds them up. Other rows would add zeros. Beyond the clip q = ±127, so x·q = 127 |x|.
struct CosineSlope {
    using Aside = f64;  // q·q in four lanes
    static constexpr int vectors = 1;
    f32 clip;

    static constexpr s64 sums() { return 4; }

    template <int V, class Lanes>
    void columns(const Piece& piece, s64 c, Lanes lanes, f64* acc, s64 padded, f64* aside) const {
        static_assert(kStatisticsBlock <= 64, "a bit for every row");
        const __m256 inverse = _mm256_set1_ps(inverse_scale(clip)), bound = _mm256_set1_ps(clip), sign = _mm256_set1_ps(-0.0f);
        Sums<V> xq(acc), xx(acc + padded);
        __m256 integers[V] = {};
        u64 marked[V] = {};
        for (s64 row = 0; row < piece.rows; ++row) {
            const f32* from = piece.x + row * piece.x_stride + c;
            piece.fetch_ahead(c, row);
            for (int v = 0; v < V; ++v) {
                const __m256 x = lanes.load(from + 8 * v), q = nearest(_mm256_mul_ps(x, inverse));
                const Wide wide = lanes.wide(from + 8 * v, x);
                xq.add_product(v, wide, widen(q));
                xx.add_product(v, wide, wide);
                integers[v] = _mm256_fmadd_ps(q, q, integers[v]);
                const __m256 beyond = _mm256_cmp_ps(_mm256_andnot_ps(sign, x), bound, _CMP_GT_OQ);
                marked[v] |= static_cast<u64>(_mm256_movemask_ps(beyond) != 0) << row;
            }
        }
        xq.save(acc), xx.save(acc + padded);
        for (int v = 0; v < V; ++v) {
            add_integers(aside, integers[v]);
            add_beyond(marked[v], piece, c + 8 * v, lanes, acc + 2 * padded + 8 * v, acc + 3 * padded + 8 * v);
        }
    }

private:
    template <class Lanes>
    void add_beyond(u64 rows, const Piece& piece, s64 c, Lanes lanes, f64* products, f64* squares) const {
        if (!rows) return;
        const __m256 bound = _mm256_set1_ps(clip), sign = _mm256_set1_ps(-0.0f);
        const Wide most{_mm256_set1_pd(kMax), _mm256_set1_pd(kMax)};
        Sums<1> xq(products), xx(squares);
        for (; rows; rows &= rows - 1) {
            const __m256 size = _mm256_andnot_ps(sign, lanes.load(piece.x + __builtin_ctzll(rows) * piece.x_stride + c));
            const Wide outer = widen(_mm256_and_ps(size, _mm256_cmp_ps(size, bound, _CMP_GT_OQ)));
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
            piece.fetch_ahead(c, row);
            for (int v = 0; v < V; ++v) {
                const Wide x = lanes.wide(from + 8 * v, lanes.load(from + 8 * v));
                const Wide q = lanes.integers(piece.q + row * piece.q_stride + c + 8 * v);
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
    static Wide product(const Wide& a, const Wide& b) { return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)}; }

    template <int V, class Lanes>
    void columns(const Piece& piece, s64 c, Lanes lanes, f64* acc, s64 padded, f64*) const {
        const Wide scale = widen(_mm256_loadu_ps(piece.scale + c));
        Sums<V> dot(acc), rounded_squares(acc + padded), squares(acc + 2 * padded);
        for (s64 row = 0; row < piece.rows; ++row) {
            const f32* from = piece.x + row * piece.x_stride + c;
            piece.fetch_ahead(c, row);
            const Wide x = lanes.wide(from, lanes.load(from));
            const Wide rounded = product(lanes.integers(piece.q + row * piece.q_stride + c), scale);
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
    std::vector<s32> peaks(round_up(C, 8), 0);
    const auto join = [](s32& all, s32 part) { all = part > all ? part : all; };
    const auto totals = ordered_sums(source, Moments{}, threads, peaks, join);
    std::memcpy(peak, peaks.data(), C * sizeof(f32));
    std::memcpy(sum, totals.data(), C * sizeof(f64));
    std::memcpy(squares, totals.data() + C, C * sizeof(f64));
}

void channel_cosine_terms(const Rows& given, const f32* x, CandidateClips clips, bool stochastic, f64* terms, int threads) {
    constexpr s64 kTogether = 8;  // candidates per pass: bounds the scratch memory, and beyond a few a pass is all arithmetic
    const Source source{merged(given), x, nullptr, {nullptr, 0, 0}};
    const s64 C = source.rows.channels, stride = round_up(C, 16) + 16;
    std::vector<f32> inverse(kTogether * stride, 0.0f);
    std::vector<f64> nothing;
    for (s64 first = 0; first < clips.count; first += kTogether) {
        const s64 some = clips.count - first < kTogether ? clips.count - first : kTogether;
        for (s64 k = 0; k < some; ++k)
            for (s64 c = 0; c < C; ++c) {
                const f32 clip = clips.at(first + k, c, C);
                inverse[k * stride + c] = is_live(clip) ? inverse_scale(clip) : 0.0f;
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
    for (s64 i = 0; i < clips.count * 3; ++i) terms[i] = tree(sums.data() + i * C, C);
}

void cosine_slope_terms(const Rows& given, const f32* x, f32 clip, f64* terms, int threads) {
    if (!is_live(clip)) return generic::cosine_slope_terms(given, x, clip, terms, threads);
    const Source source{merged(given), x, nullptr, {nullptr, 0, 0}};
    const s64 C = source.rows.channels;
    std::vector<f64> integers(4, 0.0);
    const auto totals = ordered_sums(source, CosineSlope{clip}, threads, integers, add_to);
    terms[0] = tree(totals.data(), C);
    terms[1] = lanes_of(integers.data());
    terms[2] = tree(totals.data() + C, C);
    slope_terms(clip, tree(totals.data() + 3 * C, C), tree(totals.data() + 2 * C, C), terms);
}

void dot_terms(const Rows& given, const f32* x, const s8* q, PerScale scale, f64* terms, int threads) {
    const Source source{scale.outer_stride ? given : merged(given), x, q, scale};
    const s64 C = source.rows.channels;
    std::vector<f64> nothing;
    const bool by_channel = scale.outer_stride == 0;
    auto totals = by_channel ? ordered_sums(source, Dot{}, threads, nothing, add_to)
                             : ordered_sums(source, ScaledDot{}, threads, nothing, add_to);
    if (by_channel) scale_dots(scale, C, totals.data(), totals.data() + C);
    for (s64 k = 0; k < 3; ++k) terms[k] = tree(totals.data() + k * C, C);
}

}  // namespace byteback::avx2
