// SPDX-License-Identifier: Apache-2.0
// Max pooling (max_pool.h), four vectors of channels at a time. Compiled once per path, behind its vectors.
#pragma once

#include "block/max_pool.h"

namespace byteback::BYTEBACK_PATH {

namespace {

// kBlock channels of one window, whose values and taps stay in registers; the rest of the channels goes channel by channel.
void largest_vectors(const f32* image, const Tap* taps, s64 count, s64 channels, f32* y, u8* which) {
    s64 c = 0;
    for (; c + kBlock <= channels; c += kBlock) {
        Floats best[4];
        Ints number[4];
        for (int v = 0; v < 4; ++v) {
            best[v] = all(-std::numeric_limits<f32>::infinity());
            number[v] = all32(taps[0].number);
        }
        for (s64 t = 0; t < count; ++t) {
            const f32* x = image + taps[t].offset + c;
            const Ints tap = all32(taps[t].number);
            for (int v = 0; v < 4; ++v) {
                const Floats value = load(x + kLanes * v);
                const Mask better = either(greater(value, best[v]), is_nan(value));
                best[v] = chosen(better, value, best[v]);
                number[v] = chosen(better, tap, number[v]);
            }
        }
        for (int v = 0; v < 4; ++v) store(y + c + kLanes * v, best[v]);
        AllLanes().store_bytes(which + c, number);
    }
    largest(image, taps, count, c, channels, y, which);
}

}  // namespace

void max_pool(const Windows& p, const f32* x, f32* y, u8* taps, int threads) {
    pool_windows(p, x, y, taps, threads, largest_vectors);
}

void max_pool_grad(const Windows& p, const f32* g, const u8* taps, f32* dx, int threads) {
    pool_gradient(p, g, taps, dx, threads);
}

}  // namespace byteback::BYTEBACK_PATH
