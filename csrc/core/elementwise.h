// SPDX-License-Identifier: Apache-2.0
// The arguments of quantize and of the statistics: how a float tensor lies in memory, and what a pass reports.
#pragma once

#include "core/types.h"

namespace byteback {

// A tensor (N, C, D, H, W) as rows (pixels, in N, D, H, W order) of channels. Rows come as `outer` blocks of `inner` rows:
// element (o, i, c) lies at x[o * outer_stride + i * inner_stride + c * channel_stride], and its row is o * inner + i.
//   channels last  outer 1, inner N*D*H*W, inner_stride C, channel_stride 1
//   NCHW           outer N, inner D*H*W, outer_stride C*D*H*W, inner_stride 1, channel_stride D*H*W
// A clip, scale or threshold that varies per sample needs outer = N in either layout.
struct Rows {
    s64 outer, inner, channels;
    s64 outer_stride, inner_stride, channel_stride;

    s64 count() const { return outer * inner; }
    bool channels_last() const { return channel_stride == 1; }
};

// `batch` dense matrices to be transposed: element (r, c) of one goes from r * columns + c to c * rows + r. An activation in
// NCHW is a matrix of channels and pixels for each sample, in NHWC one of pixels and channels.
struct Matrices {
    s64 batch, rows, columns;
};

// Floats that broadcast over Rows: values[o * outer_stride + c * channel_stride], strides of 0 where they do not vary.
struct PerScale {
    const f32* values;
    s64 outer_stride;
    s64 channel_stride;

    f32 at(s64 o, s64 c) const { return values[o * outer_stride + c * channel_stride]; }
};

// Clips that a search tries: candidate k has values[k] for the whole tensor, or values[k * channels + c] for each channel.
struct CandidateClips {
    const f32* values;
    s64 count;
    bool per_channel;

    f32 at(s64 k, s64 c, s64 channels) const { return values[per_channel ? k * channels + c : k]; }
};

// The noise of stochastic rounding (ops/noise.py): h = mix32((index * 0x9E3779B1 + k0) ^ k1), index = row * ceil(C/2) + c/2,
// u = (h16 + 0.5) / 65536 with the low half of h for even c, the high half for odd c.
struct Noise {
    bool stochastic;
    u32 k0, k1;
};

// What one quantize pass saw: |x| > clip (where the clip counts), NaN or Inf, and max|x| (NaN if any element is NaN).
struct Report {
    s64 saturated;
    s64 nonfinite;
    f32 peak;
};

}  // namespace byteback
