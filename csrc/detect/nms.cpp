// SPDX-License-Identifier: Apache-2.0
// Greedy suppression: each kept box is compared once with those after it. Each coordinate has its own array, so that the inner
// loop is vectorized without a branch. The IoU is computed by a division, because a product would round differently.
#include <algorithm>
#include <vector>

#include "detect/detect.h"

namespace byteback {

void nms(s64 count, const f32* boxes, f64 threshold, u8* kept) {
    const size_t n = static_cast<size_t>(count);
    std::vector<f32> x1(n), y1(n), x2(n), y2(n), area(n), overlap(n);
    for (size_t i = 0; i < n; ++i) {
        x1[i] = boxes[4 * i], y1[i] = boxes[4 * i + 1], x2[i] = boxes[4 * i + 2], y2[i] = boxes[4 * i + 3];
        area[i] = (x2[i] - x1[i]) * (y2[i] - y1[i]);
        kept[i] = 1;
    }
    for (size_t i = 0; i < n; ++i) {
        if (!kept[i]) continue;
        const f32 left = x1[i], top = y1[i], right = x2[i], bottom = y2[i], own = area[i];
        for (size_t j = i + 1; j < n; ++j) {
            const f32 width = std::max(0.0f, std::min(right, x2[j]) - std::max(left, x1[j]));
            const f32 height = std::max(0.0f, std::min(bottom, y2[j]) - std::max(top, y1[j]));
            const f32 shared = width * height;
            overlap[j] = shared / (own + area[j] - shared);
        }
        for (size_t j = i + 1; j < n; ++j) kept[j] &= !(static_cast<f64>(overlap[j]) > threshold);
    }
}

}  // namespace byteback
