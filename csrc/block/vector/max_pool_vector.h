// SPDX-License-Identifier: Apache-2.0
// Max pooling (max_pool.h), four vectors of channels at a time. Compiled once per path, behind its vectors.
#pragma once

#include "block/max_pool.h"
#include "block/vector/norm_vector.h"

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

// The same of a pixel's gradient, whose windows' first elements are in taps.
template <int V, class Lanes>
BYTEBACK_INLINE void add_some(const f32* g, const u8* which, const Tap* taps, s64 count, s64 c, f32* to, bool stream,
                              Lanes lanes) {
    Floats sum[V];
    for (int v = 0; v < V; ++v) sum[v] = all(0.0f);
    for (s64 t = 0; t < count; ++t) {
        const s64 at = taps[t].offset + c;
        const Ints number = all32(static_cast<u32>(taps[t].number));
        for (int v = 0; v < V; ++v) {
            const Ints tap = and32(lanes.ints(reinterpret_cast<const s8*>(which) + at + kLanes * v), all32(0xFF));
            const Mask same = greater(all32(1), xor32(tap, number));
            sum[v] = sum[v] + kept(same, lanes.load(g + at + kLanes * v));
        }
    }
    for (int v = 0; v < V; ++v) lanes.store(to + c + kLanes * v, sum[v], stream);
}

void add_vectors(const f32* g, const u8* which, const Tap* taps, s64 count, s64 channels, f32* to, bool stream) {
    s64 c = 0;
    for (; c + kBlock <= channels; c += kBlock) add_some<4>(g, which, taps, count, c, to, stream, AllLanes{});
    for (; c + kLanes <= channels; c += kLanes) add_some<1>(g, which, taps, count, c, to, stream, AllLanes{});
    if (c < channels) add_some<1>(g, which, taps, count, c, to, stream, FirstLanes(channels - c));
}

}  // namespace

void max_pool(const Windows& p, const f32* x, f32* y, u8* taps, int threads) {
    pool_windows(p, x, y, taps, threads, largest_vectors);
}

void max_pool_grad(const Windows& p, const f32* g, const u8* taps, f32* dx, int threads) {
    const bool stream = should_stream(dx, p.batch * p.height * p.width, p.channels, kLanes);
    pool_gradient(
        p, dx, threads,
        [&](const Tap* windows, s64 count, f32* to) { add_vectors(g, taps, windows, count, p.channels, to, stream); },
        [] { end_streams(); });
}

}  // namespace byteback::BYTEBACK_PATH
