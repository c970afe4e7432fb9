// SPDX-License-Identifier: Apache-2.0
// Quantize and its statistics as a textbook would write them; src/byteback/ops/{reference,statistics,noise}.py in C++.
//
// A float64 sum of a channel adds the rows of each block of 64 one after the other, then the blocks as a halving tree
// (block i with block i + n/2, n a power of two, missing blocks are 0). A sum over the tensor adds the channels by the same
// tree. So everything here is made of blocks: `per_block` folds each, and the callers join them.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/generic.h"
#include "core/parallel.h"
#include "elementwise/rows.h"

namespace byteback::generic {

namespace {

constexpr f32 kLimit = kMax;

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

// Comparisons with NaN are false, so a NaN passes through as it is.
f32 clamped(f32 y) { return y < -kLimit ? -kLimit : y > kLimit ? kLimit : y; }

f32 larger(f32 a, f32 b) { return b > a || std::isnan(b) ? b : a; }

// u of stochastic rounding, see Noise.
f32 uniform(const Noise& noise, const Rows& rows, const Place& at) {
    const u32 index = static_cast<u32>(at.row(rows) * ceil_div(rows.channels, 2) + at.c / 2);
    const u32 h = mix32((index * 0x9E3779B1u + noise.k0) ^ noise.k1);
    return (static_cast<f32>(at.c % 2 ? h >> 16 : h & 0xFFFFu) + 0.5f) * (1.0f / 65536.0f);
}

// fold(so far, place) over the rows of each block: block b of channel c at [b * channels + c].
template <class T, class Fold>
std::vector<T> per_block(const Rows& rows, T start, int threads, const Fold& fold) {
    const s64 blocks = ceil_div(rows.count(), kStatisticsBlock);
    std::vector<T> result(blocks * rows.channels);
    parallel_for(threads, blocks * rows.channels, [&](s64 item) {
        const s64 first = item / rows.channels * kStatisticsBlock;
        const s64 last = first + kStatisticsBlock < rows.count() ? first + kStatisticsBlock : rows.count();
        Place at = Place::of(rows, first, item % rows.channels);
        T value = start;
        for (s64 row = first; row < last; ++row, at.next_row(rows)) value = fold(value, at);
        result[item] = value;
    });
    return result;
}

// Adds `count` vectors of `width` numbers as a halving tree.
std::vector<f64> tree(std::vector<f64> values, s64 count, s64 width) {
    s64 padded = 1;
    while (padded < count) padded *= 2;
    values.resize(padded * width, 0.0);
    for (s64 half = padded / 2; half > 0; half /= 2)
        for (s64 i = 0; i < half * width; ++i) values[i] += values[i + half * width];
    values.resize(width);
    return values;
}

// The contract's sum of product(place) for each channel.
template <class Product>
std::vector<f64> channel_sums(const Rows& rows, int threads, const Product& product) {
    // -0 is what addition leaves alone (0 would turn a sum of -0 into +0).
    auto blocks = per_block(rows, -0.0, threads, [&](f64 sum, const Place& at) { return sum + product(at); });
    const s64 count = ceil_div(rows.count(), kStatisticsBlock);
    if (rows.count() % kStatisticsBlock)  // the missing rows of the last block are +0
        for (s64 c = 0; c < rows.channels; ++c) blocks[(count - 1) * rows.channels + c] += 0.0;
    return tree(std::move(blocks), count, rows.channels);
}

template <class Product>
f64 tensor_sum(const Rows& rows, int threads, const Product& product) {
    return tree(channel_sums(rows, threads, product), rows.channels, 1)[0];
}

// x rounded to nearest under a clip, as a float: -0 and NaN stay what they are.
f32 nearest(f32 x, f32 clip) { return is_live(clip) ? std::nearbyint(clamped(x * inverse_scale(clip))) : 0.0f; }

// |x| in steps of a clip, before it is rounded.
f32 scaled_size(f32 x, f32 clip) {
    const f32 y = std::fabs(x) * inverse_scale(clip);
    return !is_live(clip) ? 0.0f : y > kLimit ? kLimit : y;
}

// E[q²] of stochastic rounding: y = n + f becomes n + 1 with probability f, so it is n² + f (2n + 1), which float64 holds.
f64 expected_square(f64 y) {
    const f64 n = std::floor(y);
    return n * n + (y - n) * (2.0 * n + 1.0);
}

}  // namespace

Report quantize(const Rows& rows, const f32* x, PerScale clip, Noise noise, s8* q, int threads) {
    std::vector<Report> parts(threads > 1 ? threads : 1, Report{0, 0, 0.0f});
    parallel_ranges(threads, rows.count() * rows.channels, [&](int thread, s64 begin, s64 end) {
        Report seen{0, 0, 0.0f};
        Place at = Place::of(rows, begin / rows.channels, begin % rows.channels);
        for (s64 item = begin; item < end; ++item, at.next(rows)) {
            const f32 bound = clip.at(at.o, at.c), value = x[at.offset(rows)], magnitude = std::fabs(value);
            f32 y = clamped(value * inverse_scale(bound));
            y = noise.stochastic ? std::floor(y + uniform(noise, rows, at)) : std::nearbyint(y);
            q[at.offset(rows)] = is_live(bound) && !std::isnan(y) ? static_cast<s8>(y) : s8{0};
            seen.saturated += is_live(bound) && magnitude > bound;
            seen.nonfinite += !std::isfinite(value);
            seen.peak = larger(seen.peak, magnitude);
        }
        parts[thread] = seen;
    });
    Report all{0, 0, 0.0f};
    for (const Report& part : parts)
        all = {all.saturated + part.saturated, all.nonfinite + part.nonfinite, larger(all.peak, part.peak)};
    return all;
}

void absmax(const Rows& rows, const f32* x, f32* per_channel, int threads) {
    const auto blocks = per_block(rows, 0.0f, threads, [&](f32 peak, const Place& at) {
        return larger(peak, std::fabs(x[at.offset(rows)]));
    });
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
    const auto blocks = per_block(rows, s64{0}, threads, [&](s64 count, const Place& at) {
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
    for (s64 i = 0; i < clips.count * 3; ++i)
        terms[i] = tree({sums.begin() + i * C, sums.begin() + (i + 1) * C}, C, 1)[0];
}

void cosine_slope_terms(const Rows& rows, const f32* x, f32 clip, f64* terms, int threads) {
    cosine_terms(rows, x, {&clip, 1, false}, false, terms, threads);
    terms[3] = terms[4] = 0.0;
    if (!is_live(clip)) return;
    const auto beyond = [&](const Place& at) { return std::fabs(x[at.offset(rows)]) > clip; };
    const auto value = [&](const Place& at) { return f64{x[at.offset(rows)]}; };
    const f64 square = tensor_sum(rows, threads, [&](const Place& at) { return beyond(at) ? value(at) * value(at) : 0.0; });
    const f64 product = tensor_sum(rows, threads, [&](const Place& at) {
        return beyond(at) ? value(at) * nearest(x[at.offset(rows)], clip) : 0.0;
    });
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
        terms[0] = tree(std::move(products), rows.channels, 1)[0];
        terms[1] = tree(std::move(squares), rows.channels, 1)[0];
        return;
    }
    const auto rounded = [&](const Place& at) { return integer(at) * f64{scale.at(at.o, at.c)}; };
    terms[0] = tensor_sum(rows, threads, [&](const Place& at) { return value(at) * rounded(at); });
    terms[1] = tensor_sum(rows, threads, [&](const Place& at) { return rounded(at) * rounded(at); });
}

}  // namespace byteback::generic
