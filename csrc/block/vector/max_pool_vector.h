// SPDX-License-Identifier: Apache-2.0
// Max pooling (max_pool.h), four vectors of channels at a time. Compiled once per path, behind its vectors.
#pragma once

#include "block/max_pool.h"

namespace byteback::BYTEBACK_PATH {

namespace {

// V vectors of channels of one window, from c on: values and taps stay in registers.
template <int V, class Lanes>
BYTEBACK_INLINE void largest_some(const f32* image, const Tap* taps, s64 count, s64 c, f32* y, u8* which, Lanes lanes) {
    Floats best[V];
    Ints number[V];
    for (int v = 0; v < V; ++v) {
        best[v] = all(-std::numeric_limits<f32>::infinity());
        number[v] = all32(taps[0].number);
    }
    for (s64 t = 0; t < count; ++t) {
        const f32* x = image + taps[t].offset + c;
        const Ints tap = all32(taps[t].number);
        for (int v = 0; v < V; ++v) {
            const Floats value = lanes.load(x + kLanes * v);
            const Mask better = either(greater(value, best[v]), is_nan(value));
            best[v] = chosen(better, value, best[v]);
            number[v] = chosen(better, tap, number[v]);
        }
    }
    for (int v = 0; v < V; ++v) lanes.store(y + c + kLanes * v, best[v]);
    lanes.store_bytes(which + c, number);
}

void largest_vectors(const f32* image, const Tap* taps, s64 count, s64 channels, f32* y, u8* which) {
    s64 c = 0;
    for (; c + kBlock <= channels; c += kBlock) largest_some<4>(image, taps, count, c, y, which, AllLanes{});
    for (; c + kLanes <= channels; c += kLanes) largest_some<1>(image, taps, count, c, y, which, AllLanes{});
    if (c < channels) largest_some<1>(image, taps, count, c, y, which, FirstLanes(channels - c));
}

}  // namespace

void max_pool(const Windows& p, const f32* x, f32* y, u8* taps, int threads) {
    pool_windows(p, x, y, taps, threads, largest_vectors);
}

void max_pool_grad(const Windows& p, const f32* g, const u8* taps, f32* dx, int threads) {
    pool_gradient(p, g, taps, dx, threads);
}

}  // namespace byteback::BYTEBACK_PATH
