// SPDX-License-Identifier: Apache-2.0
// What a gradient's two copies need, for Python (ops/pairs.py, ops/magnitude.py): of floats that are there, or of the fused
// block's gradient, which is not written. Of each pair, first what belongs to the one clip, then to the clips per channel.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>

#include <array>
#include <numeric>
#include <tuple>
#include <vector>

#include "quantizer/magnitude.h"
#include "block/norm.h"
#include "bindings/norm_numbers.h"

namespace nb = nanobind;
using namespace byteback;

namespace {

using Pair = std::array<Address, 2>;

void tail_count_pair(int path, s64 rows, s64 channels, Address x, Address each, Address all, Address over_each,
                     Address over_all, int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(tail_count_pair, rows, channels, at<const f32>(x), at<const f32>(each), *at<const f32>(all),
                  at<s64>(over_each), at<s64>(over_all), threads);
}

void normalize_grad_tails(int path, const BackwardNumbers& from, Address each, Address all, Address peak, Address over_each,
                          Address over_all, int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(normalize_grad_tails, backward_of(from), at<const f32>(each), *at<const f32>(all), at<f32>(peak),
                  at<s64>(over_each), at<s64>(over_all), threads);
}

// total, squares: sums of each channel. count_tails(σ of each channel, σ of all, tails of the channels, tails of all) gives
// max|x| of each channel. before: the last clips, 0 for none; rule: threshold, keep, add. The shares that are Gaussian.
template <class CountTails>
std::tuple<f64, f64> choose_both(s64 rows, s64 channels, const f64* total, const f64* squares, const Pair& before,
                                 const std::array<f64, 3>& rule, const Pair& clips, const CountTails& count_tails) {
    const size_t width = static_cast<size_t>(channels);
    std::vector<f32> each(width);
    for (s64 c = 0; c < channels; ++c) each[static_cast<size_t>(c)] = deviation(total[c], squares[c], rows);
    const f32 one = deviation(sum_channels(total, channels), sum_channels(squares, channels), rows * channels);
    std::vector<s64> tail(width), tail_one(width);
    const f32* peak = count_tails(each.data(), one, tail.data(), tail_one.data());
    const MagnitudeRule numbers{rule[0], static_cast<f32>(rule[1]), static_cast<f32>(rule[2])};
    const f32 peak_one = largest(peak, channels);
    const s64 all = std::accumulate(tail_one.begin(), tail_one.end(), s64{0});
    return {choose_clips(numbers, 1, &peak_one, &all, rows * channels, at<const f32>(before[0]), at<f32>(clips[0])),
            choose_clips(numbers, channels, peak, tail.data(), rows, at<const f32>(before[1]), at<f32>(clips[1]))};
}

// moments: max|x|, sum and sum of squares of each channel
std::tuple<f64, f64> magnitude_clips(int path, s64 rows, s64 channels, Address x, const std::array<Address, 3>& moments,
                                     const Pair& before, const std::array<f64, 3>& rule, const Pair& clips, int threads) {
    nb::gil_scoped_release unlocked;
    const auto count_tails = [&](const f32* each, f32 one, s64* tail, s64* tail_one) {
        BYTEBACK_CALL(tail_count_pair, rows, channels, at<const f32>(x), each, one, tail, tail_one, threads);
        return at<const f32>(moments[0]);
    };
    return choose_both(rows, channels, at<const f64>(moments[1]), at<const f64>(moments[2]), before, rule, clips, count_tails);
}

void write_reports(const Report reports[2], s64 channels, Address clip, Address clips, const Pair& scale, const Pair& counts,
                   const Pair& peak) {
    write_scales(at<const f32>(clip), 1, at<f32>(scale[0]));
    write_scales(at<const f32>(clips), channels, at<f32>(scale[1]));
    for (int i = 0; i < 2; ++i) {
        write_counts(reports[i], counts[i]);
        *at<f32>(peak[i]) = reports[i].peak;
    }
}

void quantize_pair(int path, s64 rows, s64 channels, Address x, Address clip, Address clips, Address key, const Pair& values,
                   const Pair& scale, const Pair& counts, const Pair& peak, int threads) {
    nb::gil_scoped_release unlocked;
    Report reports[2];
    BYTEBACK_CALL(quantize_pair, rows, channels, at<const f32>(x), *at<const f32>(clip), at<const f32>(clips), noise_of(key),
                  at<s8>(values[0]), at<s8>(values[1]), reports, threads);
    write_reports(reports, channels, clip, clips, scale, counts, peak);
}

void normalize_grad_quantize_pair(int path, const BackwardNumbers& numbers, Address clip, Address clips, Address key,
                                  const Pair& values, const Pair& scale, const Pair& counts, const Pair& peak, int threads) {
    nb::gil_scoped_release unlocked;
    const Backward from = backward_of(numbers);
    Report reports[2];
    BYTEBACK_CALL(normalize_grad_quantize_pair, from, *at<const f32>(clip), at<const f32>(clips), noise_of(key),
                  at<s8>(values[0]), at<s8>(values[1]), reports, threads);
    write_reports(reports, from.channels, clip, clips, scale, counts, peak);
}

// The copy of dx by clips that are a ratio of each channel's max|dx|.
void normalize_grad_quantize_by_ratio(int path, const BackwardNumbers& numbers, f32 ratio, Address key, Address clips,
                                      Address values, Address scale, Address counts, Address peak, int threads) {
    nb::gil_scoped_release unlocked;
    const Backward from = backward_of(numbers);
    const size_t width = static_cast<size_t>(from.channels);
    f32* bounds = at<f32>(clips);
    std::vector<f32> sigma(width, 0.0f);
    std::vector<s64> tail(width), tail_one(width);  // not asked for: the pass is as long as memory takes
    BYTEBACK_CALL(normalize_grad_tails, from, sigma.data(), 0.0f, bounds, tail.data(), tail_one.data(), threads);
    for (s64 c = 0; c < from.channels; ++c) bounds[c] *= ratio;
    Report reports[2];
    BYTEBACK_CALL(normalize_grad_quantize_pair, from, 0.0f, bounds, noise_of(key), nullptr, at<s8>(values), reports, threads);
    write_scales(bounds, from.channels, at<f32>(scale));
    write_counts(reports[1], counts);
    *at<f32>(peak) = reports[1].peak;
}

// Clips and copies of dx at once. sums: sum and sum of squares of each channel of dx; the first of values and scale is 0 where
// no copy by one clip is wanted. The shares that are Gaussian, how many values each copy cut off, and how many are not finite.
std::tuple<f64, f64, s64, s64, s64> gradient_pair(int path, const BackwardNumbers& numbers, const Pair& sums, const Pair& before,
                                                  const std::array<f64, 3>& rule, Address key, const Pair& clips,
                                                  const Pair& values, const Pair& scale, int threads) {
    nb::gil_scoped_release unlocked;
    const Backward from = backward_of(numbers);
    std::vector<f32> peak(static_cast<size_t>(from.channels));
    const auto count_tails = [&](const f32* each, f32 one, s64* tail, s64* tail_one) {
        BYTEBACK_CALL(normalize_grad_tails, from, each, one, peak.data(), tail, tail_one, threads);
        return static_cast<const f32*>(peak.data());
    };
    const auto [one, each] =
        choose_both(from.rows, from.channels, at<const f64>(sums[0]), at<const f64>(sums[1]), before, rule, clips, count_tails);
    Report reports[2];
    BYTEBACK_CALL(normalize_grad_quantize_pair, from, *at<const f32>(clips[0]), at<const f32>(clips[1]), noise_of(key),
                  at<s8>(values[0]), at<s8>(values[1]), reports, threads);
    if (values[0]) write_scales(at<const f32>(clips[0]), 1, at<f32>(scale[0]));
    write_scales(at<const f32>(clips[1]), from.channels, at<f32>(scale[1]));
    return {one, each, reports[0].saturated, reports[1].saturated, reports[0].nonfinite};
}

}  // namespace

void bind_pairs(nb::module_& m) {
    m.def("tail_count_pair", &tail_count_pair);
    m.def("normalize_grad_tails", &normalize_grad_tails);
    m.def("magnitude_clips", &magnitude_clips);
    m.def("gradient_pair", &gradient_pair);
    m.def("normalize_grad_quantize_by_ratio", &normalize_grad_quantize_by_ratio);
    m.def("quantize_pair", &quantize_pair);
    m.def("normalize_grad_quantize_pair", &normalize_grad_quantize_pair);
}
