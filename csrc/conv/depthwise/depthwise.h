// SPDX-License-Identifier: Apache-2.0
// Depthwise convolutions (groups == C == K): there is no sum over channels, so a vector contains channels and no GEMM is used.
//
// The multiply is vpmaddwd or vpdpwssd: 8 or 16 channels, for each the sum of two products of int16, exact in int32. Its two
// products are two rows: a *row pair* is the rows a and b of one image, widened to int16 and interleaved, with the zeros of the
// padding written out. Its layout is [block of channels][column][channels of the block][a, b], a vector per column, so a kernel
// reads a row with plain loads, without shuffles, borders or channel tails. Pairs are made in one pass over the int8 input, and
// they stay in the cache.
//
//   output, grad_input   Square kernels 3, 5, 7 with stride 1 or 2 and dilation 1 (any padding) run as a *stencil*: an output
//                        tile (two rows; for grad_input with stride 2 a tile of 2x2 phases) reads the same row pairs, with a
//                        weight for each of them and each pixel of the tile. Of these, 3x3 kernels over whole lanes of
//                        channels need no row pairs (depthwise_direct.h). All others use the list of the taps that are inside
//                        the image, for each pixel (depthwise_taps.h).
//   grad_weight          Always uses row pairs, of g and of x: vpmaddwd sums over two rows, one accumulator per tap.
//
// Sums of at most kInt32Depth products are int32. Longer sums (only in grad_weight) are added to int64 before they can
// overflow. Compiled once per path, after its vectors (x86/depthwise_vector_*.h).
#pragma once

#include "conv/depthwise/depthwise_direct.h"
#include "conv/depthwise/depthwise_scatter.h"
#include "conv/depthwise/depthwise_grad_weight.h"
#include "conv/depthwise/depthwise_stencil.h"
#include "conv/depthwise/depthwise_taps.h"

namespace byteback::BYTEBACK_PATH {

bool depthwise_fits(const ConvShape& s) {
    return s.groups == s.in_channels && s.groups == s.out_channels && s.taps() <= kInt32Depth;
}

void depthwise_output(const ConvShape& s, const s8* x, const s8* w, Factor factor, f32* y, int threads,
                      const Epilogue* finish) {
    if (s.batch * s.out_pixels() * s.in_channels == 0) return;
    if (!is_stencil(s)) return tap_route(tap_product(s, false), s.batch, x, w, factor, y, threads, finish);
    const Images im = planes_of(s, s.in, s.out);
    if (is_direct(s)) {
        const Direct p{im.frames,
                       im.frames_per_sample,
                       im.channels,
                       {s.in[1], s.in[2]},
                       {s.out[1], s.out[2]},
                       {s.padding[1], s.padding[2]},
                       false};
        return (s.stride[1] == 1 ? direct<1> : direct<2>)(p, x, w, factor, y, threads, finish);
    }
    if (s.kernel[1] == 3) stencil_output<3>(s, im, x, w, factor, y, threads, finish);
    if (s.kernel[1] == 5) stencil_output<5>(s, im, x, w, factor, y, threads, finish);
    if (s.kernel[1] == 7) stencil_output<7>(s, im, x, w, factor, y, threads, finish);
}

void depthwise_grad_input(const ConvShape& s, const s8* g, const s8* w, Factor factor, f32* dx, int threads) {
    if (s.batch * s.in_pixels() * s.in_channels == 0) return;
    if (!is_stencil(s)) return tap_route(tap_product(s, true), s.batch, g, w, factor, dx, threads);
    const Images im = planes_of(s, s.out, s.in);
    if (s.stride[1] == 1 && is_direct(s)) {
        const Direct p{im.frames,
                       im.frames_per_sample,
                       im.channels,
                       {s.out[1], s.out[2]},
                       {s.in[1], s.in[2]},
                       {2 - s.padding[1], 2 - s.padding[2]},
                       true};
        return direct<1>(p, g, w, factor, dx, threads);
    }
    if (is_direct(s))
        return scatter({im.frames,
                        im.frames_per_sample,
                        im.channels,
                        {s.out[1], s.out[2]},
                        {s.in[1], s.in[2]},
                        {s.padding[1], s.padding[2]}},
                       g, w, factor, dx, threads);
    if (s.kernel[1] == 3) stencil_grad_input<3>(s, im, g, w, factor, dx, threads);
    if (s.kernel[1] == 5) stencil_grad_input<5>(s, im, g, w, factor, dx, threads);
    if (s.kernel[1] == 7) stencil_grad_input<7>(s, im, g, w, factor, dx, threads);
}

void depthwise_grad_weight(const ConvShape& s, const s8* g, const s8* x, Factor factor, f32* dw, int threads) {
    const GradWeightPlan plan(s);
    const bool deep = s.batch * s.out_pixels() > kInt32Depth;
    const s64 count = std::max<s64>(1, std::min<s64>(threads, plan.units));
    const s64 sum_bytes = Carver::bytes<s32>(plan.sums()), deep_bytes = deep ? Carver::bytes<s64>(plan.sums()) : 0;
    Carver memory(scratch<SharedScratch>(static_cast<size_t>(count * (sum_bytes + deep_bytes))));
    std::vector<Part> parts;
    for (s64 i = 0; i < count; ++i) {
        s32* sums = memory.take<s32>(plan.sums());
        parts.push_back({sums, deep ? memory.take<s64>(plan.sums()) : nullptr, false});
    }
    parallel_shares(threads, plan.units, [&](int thread, const auto& next) {
        Part& part = parts[static_cast<size_t>(thread)];
        part.used = true;
        GradWeightRun run(s, plan, g, x, part.sums, part.deep);
        for (s64 begin, end; next(begin, end);) run.units(begin, end);
        run.flush();
    });
    write_grad_weight(s, parts, factor, dw);
}

}  // namespace byteback::BYTEBACK_PATH
