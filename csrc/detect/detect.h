// SPDX-License-Identifier: Apache-2.0
// The two detection operators that torchvision has in C++, used if its library cannot be loaded. Float32.
//
// nms        non-maximum suppression: which boxes are kept
// roi_align  for every box a small grid of bilinear samples of a feature map, and its gradient
#pragma once

#include "core/types.h"

namespace byteback {

// boxes: count x (x1, y1, x2, y2), best first. kept[i] becomes 1 where no kept box before i has an IoU above the threshold.
void nms(s64 count, const f32* boxes, f64 threshold, u8* kept);

struct RoiShape {
    s64 batch, height, width, channels;  // of the map, NHWC
    s64 rois;                            // rows (image, x1, y1, x2, y2)
    s64 bins_y, bins_x;                  // of the result: rois x bins_y x bins_x x channels
    f32 scale;                           // from the boxes' pixels to the map's
    s64 samples;                         // per bin and axis; 0 or less: as many as a bin has pixels
    bool aligned;                        // pixels have their centre at half coordinates
};

void roi_align(const RoiShape& shape, const f32* input, const f32* rois, f32* output, int threads);

// grad_input is written whole.
void roi_align_grad(const RoiShape& shape, const f32* grad_output, const f32* rois, f32* grad_input, int threads);

}  // namespace byteback
