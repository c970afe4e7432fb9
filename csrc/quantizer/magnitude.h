// SPDX-License-Identifier: Apache-2.0
// Magnitude-aware clips from the statistics of a gradient (ops/magnitude.py has the rule and the reference): a little
// arithmetic per channel, which would take longer in PyTorch than counting the tails of a small layer. All paths use it.
#pragma once

#include "core/types.h"

namespace byteback {

struct MagnitudeRule {
    f64 threshold;  // the share of the tail above which a gradient counts as Gaussian
    f32 keep, add;  // clip = before · keep + max|g| · add
};

// The standard deviation of `count` numbers from their sums.
f32 deviation(f64 total, f64 squares, s64 count);

// The contract's sum over channels.
f64 sum_channels(const f64* values, s64 channels);

// max|g| over channels; NaN if one is.
f32 largest(const f32* peak, s64 channels);

// clips[c] from max|g| and how many of `count` |g| lie in the tail; `before` is null for the first time. Returns the share of
// channels that counted as Gaussian.
f64 choose_clips(const MagnitudeRule&, s64 channels, const f32* peak, const s64* tail, s64 count, const f32* before,
                 f32* clips);

}  // namespace byteback
