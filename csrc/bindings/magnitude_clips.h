// SPDX-License-Identifier: Apache-2.0
// Magnitude-aware clips of a tensor and of its channels at once (quantizer/magnitude.h has the arithmetic), for the bindings.
#pragma once

#include <numeric>
#include <tuple>
#include <vector>

#include "bindings/structs.h"
#include "quantizer/magnitude.h"

namespace byteback {

// A rule for clips and the clips of the last time, 0 for none.
struct MagnitudeClips {
    f64 threshold;
    f32 keep, add;
    Address before_one, before_each;
};

namespace {

// total, squares: sums of each channel. count_tails(σ of each channel, σ of all, tails of the channels, tails of all) gives
// max|x| of each channel. The shares that are Gaussian.
template <class CountTails>
std::tuple<f64, f64> choose_both(s64 rows, s64 channels, const f64* total, const f64* squares, const MagnitudeClips& rule,
                                 f32* clip, f32* clips, const CountTails& count_tails) {
    const size_t width = static_cast<size_t>(channels);
    std::vector<f32> each(width);
    for (s64 c = 0; c < channels; ++c) each[static_cast<size_t>(c)] = deviation(total[c], squares[c], rows);
    const f32 one = deviation(sum_channels(total, channels), sum_channels(squares, channels), rows * channels);
    std::vector<s64> tail(width), tail_one(width);
    const f32* peak = count_tails(each.data(), one, tail.data(), tail_one.data());
    const MagnitudeRule numbers{rule.threshold, rule.keep, rule.add};
    const f32 peak_one = largest(peak, channels);
    const s64 all = std::accumulate(tail_one.begin(), tail_one.end(), s64{0});
    return {choose_clips(numbers, 1, &peak_one, &all, rows * channels, at<const f32>(rule.before_one), clip),
            choose_clips(numbers, channels, peak, tail.data(), rows, at<const f32>(rule.before_each), clips)};
}

}  // namespace
}  // namespace byteback
