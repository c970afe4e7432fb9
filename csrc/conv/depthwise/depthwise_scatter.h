// SPDX-License-Identifier: Apache-2.0
// grad_input of a depthwise 3x3 convolution with stride 2, a lane (16 channels; 32 with 512 bits) at a time, directly from the
// int8 gradient.
//
// With i' = i + padding, a destination row with even i' uses two gradient rows (taps 0 and 2 of g[i'/2] and g[i'/2 - 1]), and
// one with odd i' uses one (tap 1 of g[(i' - 1)/2]). The same holds for columns. So the four destinations of block (a, b), i' =
// 2a and 2a + 1, j' = 2b and 2b + 1, use the four gradients g[a-1..a][b-1..b] with nine taps in total. Gradients outside the
// image are zeros, and destinations outside it are skipped.
//
// There is little arithmetic and much to write, so memory bandwidth is the limit: whole cache lines are written, row by row.
//
// For depthwise.h only. Compiled once per path, after its vectors.
#pragma once

#include "conv/depthwise/depthwise_direct.h"

namespace byteback {
namespace {

struct Scatter {
    s64 frames, frames_per_sample, channels;
    s64 from[2], to[2], padding[2];  // of the gradient, of the result
};

// [block of kLane channels][tap][channel]
void pack_scatter(s64 channels, const s8* w, s16* packed) {
    for (s64 block = 0; block < channels; block += kLane, packed += 9 * kLane)
        for (s64 c = 0; c < kLane; ++c)
            for (s64 t = 0; t < 9; ++t) packed[t * kLane + c] = w[(block + c) * 9 + t];
}

// The two destinations of a block in its even row, or in its odd one: the even column's and the odd column's, null where it
// lies beyond the image. g: row a - 1, columns b - 1 and b, then row a.
template <bool Odd, bool Stream>
void scatter_half(const s8* const (&g)[4], const s16* weights, const f32* factors, f32* even, f32* odd, s64 channels) {
    for (s64 c = 0; c < channels; c += kLane, weights += 9 * kLane) {
        const V left = widen_bytes(g[2] + c), here = widen_bytes(g[3] + c);
        const auto product = [&](V x, int tap) BYTEBACK_ALWAYS { return mul16(x, load(weights + tap * kLane)); };
        const auto two = [&](V x, int tap, V y, int other)
                             BYTEBACK_ALWAYS { return add16(product(x, tap), product(y, other)); };
        if constexpr (Odd) {
            if (even) write_sum<Stream>(two(here, 3, left, 5), factors + c, even + c);
            if (odd) write_sum<Stream>(product(here, 4), factors + c, odd + c);
        } else {
            const V before = widen_bytes(g[0] + c), above = widen_bytes(g[1] + c);
            if (even) write_sum<Stream>(two(here, 0, left, 2), two(above, 6, before, 8), factors + c, even + c);
            if (odd) write_sum<Stream>(two(here, 1, above, 7), factors + c, odd + c);
        }
    }
}

// Results from here on bypass the cache. Measured on 7 and 10 MB, swept from the caches before and read right after: 1.0 to
// 1.2x.
constexpr s64 kScatterStreamBytes = s64{4} << 20;

// One thread's share: rows of blocks.
template <bool Stream>
void scatter_rows(const Scatter& p, const s8* g, const s16* weights, Factor factor, f32* dx, s64 begin, s64 end) {
    const s64 C = p.channels, per_frame = (p.to[0] + p.padding[0] + 1) / 2, across = (p.to[1] + p.padding[1] + 1) / 2;
    Carver memory(scratch<ThreadScratch>(static_cast<size_t>(Carver::bytes<s8>(C) + Carver::bytes<f32>(C))));
    s8* zeros = memory.take<s8>(C);
    f32* factors = memory.take<f32>(C);
    std::memset(zeros, 0, static_cast<size_t>(C));
    s64 sample = -1;
    for (s64 at = begin; at < end; ++at) {
        const s64 frame = at / per_frame, a = at % per_frame;
        if (sample < 0 || (factor.row && frame / p.frames_per_sample != sample)) {
            sample = frame / p.frames_per_sample;
            fill_factors(factor, sample, C, factors);
        }
        for (s64 odd = 0; odd < 2; ++odd) {  // one row of the result after the other: memory likes to be written in order
            const s64 i = 2 * a + odd - p.padding[0];
            if (i < 0 || i >= p.to[0]) continue;
            for (s64 b = 0; b < across; ++b) {
                const s8* from[4];
                for (s64 k = 0; k < 4; ++k) {
                    const s64 row = a - 1 + k / 2, column = b - 1 + k % 2;
                    const bool inside = row >= 0 && row < p.from[0] && column >= 0 && column < p.from[1];
                    from[k] = inside ? g + ((frame * p.from[0] + row) * p.from[1] + column) * C : zeros;
                }
                const s64 j = 2 * b - p.padding[1];
                f32* row = dx + (frame * p.to[0] + i) * p.to[1] * C;
                f32* even = j >= 0 && j < p.to[1] ? row + j * C : nullptr;
                f32* next = j + 1 >= 0 && j + 1 < p.to[1] ? row + (j + 1) * C : nullptr;
                (odd ? scatter_half<true, Stream> : scatter_half<false, Stream>)(from, weights, factors, even, next, C);
            }
        }
    }
    if (Stream) end_streams();
}

void scatter(const Scatter& p, const s8* g, const s8* w, Factor factor, f32* dx, int threads) {
    s16* weights = reinterpret_cast<s16*>(scratch<SharedScratch>(static_cast<size_t>(9 * p.channels) * sizeof(s16)));
    pack_scatter(p.channels, w, weights);
    const s64 bytes = p.frames * p.to[0] * p.to[1] * p.channels * static_cast<s64>(sizeof(f32));
    const bool stream = bytes >= kScatterStreamBytes && reinterpret_cast<uintptr_t>(dx) % 64 == 0;
    parallel_parts(threads, p.frames * ((p.to[0] + p.padding[0] + 1) / 2), [&](s64 begin, s64 end) {
        (stream ? scatter_rows<true> : scatter_rows<false>)(p, g, weights, factor, dx, begin, end);
    });
}

}  // namespace
}  // namespace byteback
