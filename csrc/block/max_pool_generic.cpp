// SPDX-License-Identifier: Apache-2.0
#include "block/max_pool.h"

namespace byteback::generic {

void max_pool(const Windows& p, const f32* x, f32* y, u8* taps, int threads) {
    pool_windows(p, x, y, taps, threads, [](const f32* image, const Tap* within, s64 count, s64 channels, f32* to, u8* which) {
        largest(image, within, count, 0, channels, to, which);
    });
}

void max_pool_grad(const Windows& p, const f32* g, const u8* taps, f32* dx, int threads) {
    pool_gradient(
        p, dx, threads, [&](const Tap* windows, s64 count, f32* to) { add_chosen(g, taps, windows, count, 0, p.channels, to); },
        [] {});
}

}  // namespace byteback::generic
