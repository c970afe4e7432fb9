// SPDX-License-Identifier: Apache-2.0
// Quantize and its statistics in simple loops, as in src/byteback/ops/backends/reference/{quantize,statistics}.py.
//
// Statistics are computed in blocks of 64 rows, as the contract requires (contract.h): `per_block` computes a number for each
// block, and the callers combine them.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/generic.h"
#include "core/parallel.h"
#include "elementwise/rows.h"

namespace byteback::generic {

namespace {

// One element's place, walked in N, (D,) H, W, C order.
struct Place {
    s64 o, i, c;

    static Place of(const Rows& rows, s64 row, s64 c) { return {row / rows.inner, row % rows.inner, c}; }
    s64 row(const Rows& rows) const { return o * rows.inner + i; }
    s64 offset(const Rows& rows) const { return o * rows.outer_stride + i * rows.inner_stride + c * rows.channel_stride; }

    void next_row(const Rows& rows) {
        if (++i == rows.inner) i = 0, ++o;
    }
    void next(const Rows& rows) {
        if (++c == rows.channels) c = 0, next_row(rows);
    }
};

// of_block(place of its first row, rows) for each block and channel: block b of channel c at [b * channels + c].
template <class T, class OfBlock>
std::vector<T> per_block(const Rows& rows, int threads, const OfBlock& of_block) {
    const s64 blocks = ceil_div(rows.count(), kStatisticsBlock);
    std::vector<T> result(blocks * rows.channels);
    parallel_for(threads, blocks * rows.channels, [&](s64 item) {
        const s64 first = item / rows.channels * kStatisticsBlock, left = rows.count() - first;
        result[item] =
            of_block(Place::of(rows, first, item % rows.channels), left < kStatisticsBlock ? left : kStatisticsBlock);
    });
    return result;
}

// The same by fold(so far, place) over the rows of a block.
template <class T, class Fold>
std::vector<T> folded_blocks(const Rows& rows, T start, int threads, const Fold& fold) {
    return per_block<T>(rows, threads, [&](Place at, s64 count) {
        T value = start;
        for (s64 row = 0; row < count; ++row, at.next_row(rows)) value = fold(value, at);
        return value;
    });
}

// The contract's sum of product(place) for each channel.
template <class Product>
std::vector<f64> channel_sums(const Rows& rows, int threads, const Product& product) {
    auto blocks = per_block<f64>(rows, threads, [&](Place at, s64 count) {
        return sum_block(count, [&] {
            const f64 value = product(at);
            at.next_row(rows);
            return value;
        });
    });
    add_tree(blocks.data(), ceil_div(rows.count(), kStatisticsBlock), rows.channels, 0, rows.channels);
    blocks.resize(rows.channels, 0.0);
    return blocks;
}

template <class Product>
f64 tensor_sum(const Rows& rows, int threads, const Product& product) {
    return tree_sum(channel_sums(rows, threads, product).data(), rows.channels);
}

// |x| in steps of a clip, before it is rounded.
f32 scaled_size(f32 x, f32 clip) { return is_live(clip) ? clamped(std::fabs(x) * inverse_scale(clip)) : 0.0f; }

}  // namespace

Report quantize(const Rows& rows, const f32* x, PerScale clip, Noise noise, s8* q, int threads) {
    std::vector<Report> parts(threads > 1 ? threads : 1, Report{0, 0, 0.0f});
    parallel_ranges(threads, rows.count() * rows.channels, [&](int thread, s64 begin, s64 end) {
        Report seen{0, 0, 0.0f};
        Place at = Place::of(rows, begin / rows.channels, begin % rows.channels);
        for (s64 item = begin; item < end; ++item, at.next(rows)) {
            const f32 u = noise.stochastic ? uniform(noise, rows.channels, at.row(rows), at.c) : -1.0f;
            q[at.offset(rows)] = quantized(x[at.offset(rows)], clip.at(at.o, at.c), u, seen);
        }
        parts[thread] = seen;
    });
    Report all{0, 0, 0.0f};
    for (const Report& part : parts) all = joined(all, part);
    return all;
}

void absmax(const Rows& rows, const f32* x, f32* per_channel, int threads) {
    const auto blocks = folded_blocks(rows, 0.0f, threads,
                                      [&](f32 peak, const Place& at) { return larger(peak, std::fabs(x[at.offset(rows)])); });
    for (s64 c = 0; c < rows.channels; ++c) per_channel[c] = 0.0f;
    for (size_t i = 0; i < blocks.size(); ++i) {
        f32& peak = per_channel[i % rows.channels];
        peak = larger(peak, blocks[i]);
    }
}

void absmax_outer(const Rows& rows, const f32* x, f32* per_outer, int threads) {
    parallel_for(threads, rows.outer, [&](s64 o) {
        f32 peak = 0.0f;
        for (s64 i = 0; i < rows.inner; ++i)
            for (s64 c = 0; c < rows.channels; ++c) peak = larger(peak, std::fabs(x[Place{o, i, c}.offset(rows)]));
        per_outer[o] = peak;
    });
}

void moments(const Rows& rows, const f32* x, f32* peak, f64* sum, f64* squares, int threads) {
    absmax(rows, x, peak, threads);
    const auto value = [&](const Place& at) { return f64{x[at.offset(rows)]}; };
    const auto sums = channel_sums(rows, threads, value);
    const auto products = channel_sums(rows, threads, [&](const Place& at) { return value(at) * value(at); });
    for (s64 c = 0; c < rows.channels; ++c) sum[c] = sums[c], squares[c] = products[c];
}

void tail_count(const Rows& rows, const f32* x, PerScale threshold, s64* counts, int threads) {
    const auto blocks = folded_blocks(rows, s64{0}, threads, [&](s64 count, const Place& at) {
        return count + (std::fabs(x[at.offset(rows)]) > threshold.at(at.o, at.c));
    });
    for (s64 c = 0; c < rows.channels; ++c) counts[c] = 0;
    for (size_t i = 0; i < blocks.size(); ++i) counts[i % rows.channels] += blocks[i];
}

void channel_cosine_terms(const Rows& rows, const f32* x, CandidateClips clips, bool stochastic, f64* terms, int threads) {
    const s64 C = rows.channels;
    const auto value = [&](const Place& at) { return f64{x[at.offset(rows)]}; };
    const auto put = [&](s64 k, s64 term, const std::vector<f64>& sums) {
        std::copy(sums.begin(), sums.end(), terms + (k * 3 + term) * C);
    };
    const auto squares = channel_sums(rows, threads, [&](const Place& at) { return value(at) * value(at); });
    for (s64 k = 0; k < clips.count; ++k) {
        const auto clip = [&](const Place& at) { return clips.at(k, at.c, C); };
        put(k, 2, squares);
        if (!stochastic) {
            const auto q = [&](const Place& at) { return f64{nearest(x[at.offset(rows)], clip(at))}; };
            put(k, 0, channel_sums(rows, threads, [&](const Place& at) { return value(at) * q(at); }));
            put(k, 1, channel_sums(rows, threads, [&](const Place& at) { return q(at) * q(at); }));  // of integers: exact
            continue;
        }
        const auto size = [&](const Place& at) { return f64{scaled_size(x[at.offset(rows)], clip(at))}; };
        put(k, 0, channel_sums(rows, threads, [&](const Place& at) { return std::fabs(value(at)) * size(at); }));
        put(k, 1, channel_sums(rows, threads, [&](const Place& at) { return expected_square(size(at)); }));
    }
}

void cosine_terms(const Rows& rows, const f32* x, CandidateClips clips, bool stochastic, f64* terms, int threads) {
    const s64 C = rows.channels;
    std::vector<f64> sums(static_cast<size_t>(clips.count * 3 * C));
    channel_cosine_terms(rows, x, clips, stochastic, sums.data(), threads);
    for (s64 i = 0; i < clips.count * 3; ++i) terms[i] = tree_sum(sums.data() + i * C, C);
}

void cosine_slope_terms(const Rows& rows, const f32* x, f32 clip, f64* terms, int threads) {
    cosine_terms(rows, x, {&clip, 1, false}, false, terms, threads);
    terms[3] = terms[4] = 0.0;
    if (!is_live(clip)) return;
    const auto beyond = [&](const Place& at) { return std::fabs(x[at.offset(rows)]) > clip; };
    const auto value = [&](const Place& at) { return f64{x[at.offset(rows)]}; };
    const f64 square = tensor_sum(rows, threads, [&](const Place& at) { return beyond(at) ? value(at) * value(at) : 0.0; });
    const f64 product = tensor_sum(
        rows, threads, [&](const Place& at) { return beyond(at) ? value(at) * nearest(x[at.offset(rows)], clip) : 0.0; });
    slope_terms(clip, square, product, terms);
}

void dot_terms(const Rows& rows, const f32* x, const s8* q, PerScale scale, f64* terms, int threads) {
    const auto value = [&](const Place& at) { return f64{x[at.offset(rows)]}; };
    const auto integer = [&](const Place& at) { return f64{static_cast<f32>(q[at.offset(rows)])}; };
    terms[2] = tensor_sum(rows, threads, [&](const Place& at) { return value(at) * value(at); });
    if (scale.outer_stride == 0) {
        auto products = channel_sums(rows, threads, [&](const Place& at) { return value(at) * integer(at); });
        auto squares = channel_sums(rows, threads, [&](const Place& at) { return integer(at) * integer(at); });
        scale_dots(scale, rows.channels, products.data(), squares.data());
        terms[0] = tree_sum(products.data(), rows.channels);
        terms[1] = tree_sum(squares.data(), rows.channels);
        return;
    }
    const auto rounded = [&](const Place& at) { return integer(at) * f64{scale.at(at.o, at.c)}; };
    terms[0] = tensor_sum(rows, threads, [&](const Place& at) { return value(at) * rounded(at); });
    terms[1] = tensor_sum(rows, threads, [&](const Place& at) { return rounded(at) * rounded(at); });
}

}  // namespace byteback::generic
