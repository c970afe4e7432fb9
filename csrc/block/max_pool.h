// SPDX-License-Identifier: Apache-2.0
// Max-pool of channels-last images. It saves the index of the largest tap of each window, one byte per output; backward needs
// nothing else (PyTorch saves eight bytes and the input).
//
// The bits are those of PyTorch: of equal values the first in the window is chosen, NaN is larger than any number, and if
// several windows choose the same pixel, their gradients are added in the order of the windows.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "core/parallel.h"
#include "core/types.h"

namespace byteback {

struct Windows {
    s64 batch, height, width, channels;
    s64 kernel_h, kernel_w;  // at most 256 taps
    s64 stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    s64 out_height, out_width;
};

namespace generic {
void max_pool(const Windows&, const f32* x, f32* y, u8* taps, int threads);
void max_pool_grad(const Windows&, const f32* g, const u8* taps, f32* dx, int threads);
}  // namespace generic

namespace avx2 {
void max_pool(const Windows&, const f32* x, f32* y, u8* taps, int threads);
void max_pool_grad(const Windows&, const f32* g, const u8* taps, f32* dx, int threads);
}  // namespace avx2

namespace avx512vnni {
void max_pool(const Windows&, const f32* x, f32* y, u8* taps, int threads);
void max_pool_grad(const Windows&, const f32* g, const u8* taps, f32* dx, int threads);
}  // namespace avx512vnni

namespace {  // each file compiles its own copy

struct Tap {
    s64 offset;  // from the first pixel of the image
    s32 number;
};

// The taps of a window that lie within the image, in order. A dilated window may step over a narrow image: it has none, and
// taps[0] then says tap 0.
inline s64 taps_within(const Windows& p, s64 top, s64 left, Tap* taps) {
    s64 count = 0;
    taps[0] = {0, 0};
    for (s64 i = 0; i < p.kernel_h; ++i) {
        const s64 h = top + i * p.dilation_h;
        if (h < 0 || h >= p.height) continue;
        for (s64 j = 0; j < p.kernel_w; ++j) {
            const s64 w = left + j * p.dilation_w;
            if (w < 0 || w >= p.width) continue;
            taps[count++] = {(h * p.width + w) * p.channels, static_cast<s32>(i * p.kernel_w + j)};
        }
    }
    return count;
}

// The largest of the channels [begin, end) over some taps. Where all are -inf the first counts.
inline void largest(const f32* image, const Tap* taps, s64 count, s64 begin, s64 end, f32* y, u8* which) {
    for (s64 c = begin; c < end; ++c) {
        f32 best = -std::numeric_limits<f32>::infinity();
        s32 chosen = taps[0].number;
        for (s64 t = 0; t < count; ++t) {
            const f32 value = image[taps[t].offset + c];
            const bool better = value > best || value != value;
            best = better ? value : best;
            chosen = better ? taps[t].number : chosen;
        }
        y[c] = best;
        which[c] = static_cast<u8>(chosen);
    }
}

// pool(image, taps, count, channels, y, which) makes one window of all channels.
template <class Pool>
inline void pool_windows(const Windows& p, const f32* x, f32* y, u8* which, int threads, const Pool& pool) {
    parallel_for(threads, p.batch * p.out_height, [&](s64 line) {
        Tap taps[256];
        const f32* image = x + line / p.out_height * p.height * p.width * p.channels;
        const s64 top = line % p.out_height * p.stride_h - p.pad_h;
        for (s64 o = 0; o < p.out_width; ++o) {
            const s64 count = taps_within(p, top, o * p.stride_w - p.pad_w, taps), at = (line * p.out_width + o) * p.channels;
            pool(image, taps, count, p.channels, y + at, which + at);
        }
    });
}

// Along one axis, the windows that have a pixel among their taps, in order, and by which tap.
class Reach {
public:
    struct Window {
        s64 index, tap;
    };

    Reach(s64 pixels, s64 kernel, s64 stride, s64 pad, s64 dilation, s64 count) : first_(static_cast<size_t>(pixels + 1)) {
        for (s64 pixel = 0; pixel < pixels; ++pixel) {
            const s64 from = pixel + pad - (kernel - 1) * dilation;  // the first start that reaches this pixel
            const s64 end = std::min(count, (pixel + pad) / stride + 1);
            for (s64 i = from <= 0 ? 0 : ceil_div(from, stride); i < end; ++i) {
                const s64 away = pixel + pad - i * stride;
                if (away % dilation == 0) windows_.push_back({i, away / dilation});
            }
            first_[static_cast<size_t>(pixel + 1)] = windows_.size();
        }
    }

    const Window* begin(s64 pixel) const { return windows_.data() + first_[static_cast<size_t>(pixel)]; }
    const Window* end(s64 pixel) const { return begin(pixel + 1); }

private:
    std::vector<Window> windows_;
    std::vector<size_t> first_;
};

// The gradients of the channels [begin, end) of a pixel. taps: the first elements of the windows that have it, and which tap of
// theirs it is. Never -0, so that adding 0 where another tap was chosen changes nothing.
inline void add_chosen(const f32* g, const u8* which, const Tap* taps, s64 count, s64 begin, s64 end, f32* to) {
    for (s64 c = begin; c < end; ++c) {
        f32 sum = 0.0f;
        for (s64 t = 0; t < count; ++t) sum += which[taps[t].offset + c] == taps[t].number ? g[taps[t].offset + c] : 0.0f;
        to[c] = sum;
    }
}

// add(taps, count, to) makes the gradient of one pixel of all channels; end() follows a line of pixels.
template <class Add, class End>
inline void pool_gradient(const Windows& p, f32* dx, int threads, const Add& add, const End& end) {
    const Reach rows(p.height, p.kernel_h, p.stride_h, p.pad_h, p.dilation_h, p.out_height);
    const Reach columns(p.width, p.kernel_w, p.stride_w, p.pad_w, p.dilation_w, p.out_width);
    parallel_for(threads, p.batch * p.height, [&](s64 line) {
        Tap taps[256];
        const s64 image = line / p.height * p.out_height, h = line % p.height;
        for (s64 w = 0; w < p.width; ++w) {
            s64 count = 0;
            for (const Reach::Window* a = rows.begin(h); a < rows.end(h); ++a)
                for (const Reach::Window* b = columns.begin(w); b < columns.end(w); ++b)
                    taps[count++] = {((image + a->index) * p.out_width + b->index) * p.channels,
                                     static_cast<s32>(a->tap * p.kernel_w + b->tap)};
            add(taps, count, dx + (line * p.width + w) * p.channels);
        }
        end();
    });
}

}  // namespace
}  // namespace byteback
