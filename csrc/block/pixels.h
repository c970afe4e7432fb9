// SPDX-License-Identifier: Apache-2.0
// Takes every stride-th pixel of a channels-last image, and its gradient: a pool of single pixels, which residual networks use
// in the shortcut of a strided convolution (src/byteback/ops/pooling.py). Numbers are only copied, so all paths use this code.
#pragma once

#include "core/types.h"

namespace byteback {

struct Pixels {
    s64 batch, height, width, channels;
    s64 stride_h, stride_w;
    s64 out_height, out_width;  // (height - 1) / stride_h + 1, likewise
};

void take_pixels(const Pixels&, const f32* x, f32* y, int threads);

// Everything between the pixels is 0.
void spread_pixels(const Pixels&, const f32* y, f32* x, int threads);

}  // namespace byteback
