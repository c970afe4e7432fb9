// SPDX-License-Identifier: Apache-2.0
#include "quantizer/magnitude.h"

#include <cmath>
#include <vector>

namespace byteback {

f32 deviation(f64 total, f64 squares, s64 count) {
    const f64 mean = total / static_cast<f64>(count), variance = squares / static_cast<f64>(count) - mean * mean;
    return static_cast<f32>(std::sqrt(variance < 0.0 ? 0.0 : variance));
}

f64 sum_channels(const f64* values, s64 channels) {
    s64 padded = 1;
    while (padded < channels) padded *= 2;
    std::vector<f64> sums(static_cast<size_t>(padded), 0.0);
    for (s64 c = 0; c < channels; ++c) sums[static_cast<size_t>(c)] = values[c];
    for (s64 half = padded / 2; half > 0; half /= 2)
        for (s64 i = 0; i < half; ++i) sums[static_cast<size_t>(i)] += sums[static_cast<size_t>(i + half)];
    return sums[0];
}

f32 largest(const f32* peak, s64 channels) {
    f32 found = 0.0f;
    for (s64 c = 0; c < channels; ++c) {
        if (std::isnan(peak[c])) return peak[c];
        if (peak[c] > found) found = peak[c];
    }
    return found;
}

f64 choose_clips(const MagnitudeRule& rule, s64 channels, const f32* peak, const s64* tail, s64 count, const f32* before,
                 f32* clips) {
    s64 gaussian_channels = 0;
    for (s64 c = 0; c < channels; ++c) {
        const bool gaussian = static_cast<f64>(tail[c]) / static_cast<f64>(count) > rule.threshold;
        gaussian_channels += gaussian;
        // A channel that was all zero has nothing to average with: its next gradient is a first one.
        const bool fresh = gaussian || !before || before[c] == 0.0f;
        clips[c] = fresh ? peak[c] : before[c] * rule.keep + peak[c] * rule.add;
    }
    return static_cast<f64>(gaussian_channels) / static_cast<f64>(channels);
}

}  // namespace byteback
