// SPDX-License-Identifier: Apache-2.0
// The value of a bin is the mean of its samples, each a bilinear mix of four pixels. The weight of a pixel is the product of a
// weight for its row and one for its column, so each axis of a box is computed once, as a few taps (pixel, weight) per bin:
//
//     output[bin_y][bin_x] = Σ over taps_y Σ over taps_x  weight_y * weight_x * input[row][column]
//
// Samples of one bin that read the same pixel share a tap, so small boxes take less time. In forward the boxes are divided
// among threads, in backward the channels, so that no two threads add to the same number.
#include <algorithm>
#include <cmath>
#include <vector>

#include "detect/detect.h"
#include "core/parallel.h"

namespace byteback {
namespace {

struct Tap {
    s64 pixel;
    f32 weight;
};

// The taps of every bin along one axis of one box.
class Axis {
public:
    void set(f32 start, f32 end, s64 bins, s64 size, const RoiShape& shape) {
        const f32 length = shape.aligned ? end - start : std::max(end - start, 1.0f);
        const f32 step = length / static_cast<f32>(bins);
        // A box that is turned inside out has no samples; one of nonsense coordinates must not ask for all memory.
        const f32 wanted = shape.samples > 0 ? static_cast<f32>(shape.samples) : std::ceil(step);
        const s64 samples = wanted > 0.0f ? static_cast<s64>(std::min(wanted, 65536.0f)) : 0;
        taps_.clear();
        ends_.assign(1, 0);
        for (s64 bin = 0; bin < bins; ++bin) {
            const size_t first = taps_.size();
            for (s64 sample = 0; sample < samples; ++sample) {
                const f32 place = (static_cast<f32>(sample) + 0.5f) / static_cast<f32>(samples);
                add_sample(start + (static_cast<f32>(bin) + place) * step, size, first, 1.0f / static_cast<f32>(samples));
            }
            ends_.push_back(taps_.size());
        }
    }
    const Tap* begin(s64 bin) const { return taps_.data() + ends_[static_cast<size_t>(bin)]; }
    const Tap* end(s64 bin) const { return taps_.data() + ends_[static_cast<size_t>(bin) + 1]; }

private:
    // Up to one pixel outside the map takes the border's value, further out counts as zero.
    void add_sample(f32 position, s64 size, size_t first, f32 share) {
        if (!(position >= -1.0f && position <= static_cast<f32>(size))) return;
        position = std::min(std::max(position, 0.0f), static_cast<f32>(size - 1));
        const s64 low = static_cast<s64>(position);
        const f32 fraction = position - static_cast<f32>(low);
        add(low, (1.0f - fraction) * share, first);
        if (fraction > 0.0f) add(std::min(low + 1, size - 1), fraction * share, first);
    }
    void add(s64 pixel, f32 weight, size_t first) {
        for (size_t i = taps_.size(); i > first; --i)
            if (taps_[i - 1].pixel == pixel) {
                taps_[i - 1].weight += weight;
                return;
            }
        taps_.push_back({pixel, weight});
    }
    std::vector<Tap> taps_;
    std::vector<size_t> ends_;
};

struct Box {
    s64 image = 0;
    Axis y, x;

    void set(const RoiShape& shape, const f32* roi) {
        const f32 shift = shape.aligned ? 0.5f : 0.0f;
        image = static_cast<s64>(roi[0]);
        x.set(roi[1] * shape.scale - shift, roi[3] * shape.scale - shift, shape.bins_x, shape.width, shape);
        y.set(roi[2] * shape.scale - shift, roi[4] * shape.scale - shift, shape.bins_y, shape.height, shape);
    }
};

inline void add_scaled(s64 count, f32 factor, const f32* from, f32* to) {
    for (s64 i = 0; i < count; ++i) to[i] += factor * from[i];
}

}  // namespace

void roi_align(const RoiShape& s, const f32* input, const f32* rois, f32* output, int threads) {
    parallel_ranges(threads, s.rois, [&](int, s64 first, s64 last) {
        Box box;
        for (s64 r = first; r < last; ++r) {
            box.set(s, rois + 5 * r);
            const f32* image = input + box.image * s.height * s.width * s.channels;
            f32* out = output + r * s.bins_y * s.bins_x * s.channels;
            for (s64 by = 0; by < s.bins_y; ++by)
                for (s64 bx = 0; bx < s.bins_x; ++bx, out += s.channels) {
                    std::fill(out, out + s.channels, 0.0f);
                    for (const Tap* y = box.y.begin(by); y != box.y.end(by); ++y)
                        for (const Tap* x = box.x.begin(bx); x != box.x.end(bx); ++x)
                            add_scaled(s.channels, y->weight * x->weight, image + (y->pixel * s.width + x->pixel) * s.channels,
                                       out);
                }
        }
    });
}

void roi_align_grad(const RoiShape& s, const f32* grad_output, const f32* rois, f32* grad_input, int threads) {
    const s64 pixels = s.batch * s.height * s.width;
    parallel_ranges(threads, s.channels, [&](int, s64 first, s64 last) {
        const s64 some = last - first;
        for (s64 p = 0; p < pixels; ++p) std::fill_n(grad_input + p * s.channels + first, some, 0.0f);
        Box box;
        for (s64 r = 0; r < s.rois; ++r) {
            box.set(s, rois + 5 * r);
            f32* image = grad_input + box.image * s.height * s.width * s.channels + first;
            const f32* grad = grad_output + r * s.bins_y * s.bins_x * s.channels + first;
            for (s64 by = 0; by < s.bins_y; ++by)
                for (s64 bx = 0; bx < s.bins_x; ++bx, grad += s.channels)
                    for (const Tap* y = box.y.begin(by); y != box.y.end(by); ++y)
                        for (const Tap* x = box.x.begin(bx); x != box.x.end(bx); ++x)
                            add_scaled(some, y->weight * x->weight, grad, image + (y->pixel * s.width + x->pixel) * s.channels);
        }
    });
}

}  // namespace byteback
