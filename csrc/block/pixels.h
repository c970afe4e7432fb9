// SPDX-License-Identifier: Apache-2.0
// Every stride-th pixel of a channels-last image, and the gradient of that: a pool of single pixels, which is how a residual
// network skips pixels beside a strided convolution (ops/pixels.py). Numbers are only moved, so all paths share it.
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
