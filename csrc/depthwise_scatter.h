// SPDX-License-Identifier: Apache-2.0
// grad_input of a depthwise 3x3 convolution with stride 2, 16 channels at a time, straight from the int8 gradient.
//
// With i' = i + padding, a destination row of even i' meets two gradient rows (taps 0 and 2 of g[i'/2] and g[i'/2 - 1]), one of
// odd i' meets one (tap 1 of g[(i' - 1)/2]); columns likewise. So the four destinations of block (a, b), i' = 2a and 2a + 1,
// j' = 2b and 2b + 1, meet the four gradients g[a-1..a][b-1..b] under nine taps in all: each is read once, and written are
// whole cache lines. A gradient beyond the image is zeros, a destination beyond it is left out.
//
// For depthwise_avx2.cpp only: it holds AVX2 code, so everything is in an anonymous namespace.
#pragma once

#include "depthwise_direct.h"

namespace byteback::avx2 {
namespace {

struct Scatter {
    s64 frames, frames_per_sample, channels;
    s64 from[2], to[2], padding[2];  // of the gradient, of the result
};

// One block: out[2 * (odd row) + (odd column)], null where it lies beyond the image.
template <bool Stream>
void scatter_block(const s8* const (&g)[4], const s16* weights, const f32* factors, f32* const (&out)[4], s64 channels) {
    for (s64 c = 0; c < channels; c += kLane, weights += 9 * kLane) {
        const __m256i before = widen_bytes(g[0] + c), above = widen_bytes(g[1] + c);  // row a - 1, columns b - 1 and b
        const __m256i left = widen_bytes(g[2] + c), here = widen_bytes(g[3] + c);     // row a
        const auto product = [&](__m256i x, int tap) BYTEBACK_INLINE { return _mm256_mullo_epi16(x, load(weights + tap * kLane)); };
        const auto two = [&](__m256i x, int tap, __m256i y, int other) BYTEBACK_INLINE {
            return _mm256_add_epi16(product(x, tap), product(y, other));
        };
        Wide sum;
        if (out[0]) {
            sum.set(two(here, 0, left, 2), two(above, 6, before, 8));
            sum.template write<Stream>(factors + c, out[0] + c);
        }
        if (out[1]) {
            sum.set(two(here, 1, above, 7));
            sum.template write<Stream>(factors + c, out[1] + c);
        }
        if (out[2]) {
            sum.set(two(here, 3, left, 5));
            sum.template write<Stream>(factors + c, out[2] + c);
        }
        if (out[3]) {
            sum.set(product(here, 4));
            sum.template write<Stream>(factors + c, out[3] + c);
        }
    }
}

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
        for (s64 b = 0; b < across; ++b) {
            const s8* from[4];
            f32* out[4];
            for (s64 k = 0; k < 4; ++k) {
                const s64 row = a - 1 + k / 2, column = b - 1 + k % 2;
                const bool inside = row >= 0 && row < p.from[0] && column >= 0 && column < p.from[1];
                from[k] = inside ? g + ((frame * p.from[0] + row) * p.from[1] + column) * C : zeros;
                const s64 i = 2 * a + k / 2 - p.padding[0], j = 2 * b + k % 2 - p.padding[1];
                const bool real = i >= 0 && i < p.to[0] && j >= 0 && j < p.to[1];
                out[k] = real ? dx + ((frame * p.to[0] + i) * p.to[1] + j) * C : nullptr;
            }
            scatter_block<Stream>(from, weights, factors, out, C);
        }
    }
    if (Stream) _mm_sfence();
}

void scatter(const Scatter& p, const s8* g, const s8* w, Factor factor, f32* dx, int threads) {
    s16* weights = reinterpret_cast<s16*>(scratch<SharedScratch>(static_cast<size_t>(9 * p.channels) * sizeof(s16)));
    pack_direct(p.channels, false, w, weights);
    const s64 bytes = p.frames * p.to[0] * p.to[1] * p.channels * static_cast<s64>(sizeof(f32));
    const bool stream = bytes >= kStreamBytes && reinterpret_cast<uintptr_t>(dx) % 64 == 0;
    parallel_ranges(threads, p.frames * ((p.to[0] + p.padding[0] + 1) / 2), [&](int, s64 begin, s64 end) {
        (stream ? scatter_rows<true> : scatter_rows<false>)(p, g, weights, factor, dx, begin, end);
    });
}

}  // namespace
}  // namespace byteback::avx2
