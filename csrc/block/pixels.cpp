// SPDX-License-Identifier: Apache-2.0
#include "block/pixels.h"

#include <cstring>

#include "core/parallel.h"

namespace byteback {

void take_pixels(const Pixels& p, const f32* x, f32* y, int threads) {
    const size_t bytes = static_cast<size_t>(p.channels) * sizeof(f32);
    parallel_for(threads, p.batch * p.out_height, [&](s64 line) {
        const s64 n = line / p.out_height, h = line % p.out_height * p.stride_h;
        const f32* from = x + (n * p.height + h) * p.width * p.channels;
        f32* to = y + line * p.out_width * p.channels;
        for (s64 w = 0; w < p.out_width; ++w, from += p.stride_w * p.channels, to += p.channels) std::memcpy(to, from, bytes);
    });
}

void spread_pixels(const Pixels& p, const f32* y, f32* x, int threads) {
    const size_t bytes = static_cast<size_t>(p.channels) * sizeof(f32);
    parallel_for(threads, p.batch * p.height, [&](s64 line) {
        const s64 n = line / p.height, h = line % p.height;
        f32* to = x + line * p.width * p.channels;
        std::memset(to, 0, static_cast<size_t>(p.width) * bytes);
        if (h % p.stride_h) return;
        const f32* from = y + (n * p.out_height + h / p.stride_h) * p.out_width * p.channels;
        for (s64 w = 0; w < p.out_width; ++w, from += p.channels, to += p.stride_w * p.channels) std::memcpy(to, from, bytes);
    });
}

}  // namespace byteback
