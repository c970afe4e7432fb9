// SPDX-License-Identifier: Apache-2.0
// Exact integer Winograd F(4x4,3x3): 36 multiplications instead of the 144 of a direct convolution, with the same integers.
//
// The algorithm (Lavin and Gray, arXiv:1509.09308). A 4x4 tile y of outputs depends on a 6x6 patch d of inputs (patches overlap
// by 2) and on the 3x3 weights g:
//
//     y = Aᵀ [ (G g Gᵀ) ⊙ (Bᵀ d B) ] A        ⊙: elementwise, so summing over channels is 36 matrix products
//
//          4  0 -5  0  1  0           1/4     0     0
//          0 -4 -4  1  1  0          -1/6  -1/6  -1/6           1  1  1  1  1  0
//     Bᵀ = 0  4 -4 -1  1  0      G = -1/6   1/6  -1/6      Aᵀ = 0  1 -1  2 -2  0
//          0 -2 -1  2  1  0          1/24  1/12   1/6           0  1  1  4  4  0
//          0  2 -1 -2  1  0          1/24 -1/12   1/6           0  1 -1  8 -8  1
//          0  4  0 -5  0  1             0     0     1
//
// G has fractions, but 24·G = D·G' with D = diag(6, -4, -4, 1, 1, 24) and an integer matrix G', whose rows are
// (1 0 0), (1 1 1), (1 -1 1), (1 2 4), (1 -2 4), (0 0 1). D = E·F with E = diag(6, -4, -4, 1, 1, 6) and
// F = diag(1, 1, 1, 1, 1, 4): E is part of the weight transform and F of the output transform, so that all weights fit 16 bits.
// The result is 24² = 576 times y. The gradient of the weights, from patches d of the input and 4x4 tiles g of grad_output, is
//
//     576 dw = G'ᵀ D [ Σ_tiles (Bᵀ d B) ⊙ (A g Aᵀ) ] D G'
//
// grad_input is computed like an output: of gradients, with weights rotated by 180 degrees and transposed, and padding 2 -
// padding.
//
// A kernel with several taps in time is a sum of such convolutions of shifted frames. Sums commute with Aᵀ · A, so output and
// grad_input sum over time taps as over channels, before one output transform; grad_weight is one 2-D product per time tap.
//
// Bounds. A transform along one axis increases its input by at most the largest Σ|entry| of a row, and there are two axes:
//
//     Bᵀ d B           10² · 127 = 12 700
//     E G' g G'ᵀ E     12² · 127 = 18 288        all fit int16, and vpmaddwd cannot overflow
//     A g Aᵀ           15² · 127 = 28 575
//
// Sums of products are computed modulo 2^32, and so is the output transform, which only adds and shifts: the result is 576·y
// mod 2^32. 9 is odd and has an inverse modulo 2^32, 954 437 177; multiplied by it, the result is 64·y mod 2^32. If |y| < 2^25,
// that is 64·y itself, and a shift by 6 gives y exactly. chunk_is_safe (winograd_transform.h) checks this condition: longer
// sums are transformed back in chunks that satisfy it, and added as integers.
//
// winograd_kernel_*.h multiplies, winograd_transform.h and winograd_weights.h transform. winograd_correlate.h (output,
// grad_input) and winograd_grad_weight.h have the loops and decide what is kept in which cache.
#pragma once

#include <algorithm>
#include <vector>

#include "conv/winograd/winograd_correlate.h"
#include "conv/winograd/winograd_grad_weight.h"

namespace byteback {
namespace {

// Tiles of `data`, whose clips are of `size`, for results of size `tiled`. `pad` zeros lie before each axis of `data`.
Tiling tile_clips(const ConvShape& s, const s8* data, const s64 (&size)[3], s64 channels, const s64 (&tiled)[3],
                  const s64 (&pad)[3], const s8* zeros) {
    const s64 tiles_h = ceil_div(tiled[1], 4), tiles_w = ceil_div(tiled[2], 4), count = s.batch * tiled[0] * tiles_h * tiles_w;
    return {data, size[1], size[2], channels, tiles_h, tiles_w, pad[1], pad[2], size[0], tiled[0], -pad[0], count, zeros};
}

void run_output(const ConvShape& s, const s8* x, const s8* w, Factor factor, f32* y, int threads, const Epilogue* finish) {
    const std::vector<s8> zeros(s.in_channels, 0);
    const Tiling tiling = tile_clips(s, x, s.in, s.in_channels, s.out, s.padding, zeros.data());
    const Weights weights = see_weights(w, s.in_channels, s.out_channels, false, s.kernel[0]);
    correlate({tiling, weights, s.out[1], s.out[2], factor, y, false, finish}, threads);
}

// The result's pixel i meets the gradient's pixel i + padding - t under tap t: a correlation with turned taps and padding
// kernel - 1 - padding, which may be negative. The same holds for time.
void run_grad_input(const ConvShape& s, const s8* g, const s8* w, Factor factor, f32* dx, int threads) {
    const std::vector<s8> zeros(s.out_channels, 0);
    const s64 pad[3] = {s.kernel[0] - 1 - s.padding[0], 2 - s.padding[1], 2 - s.padding[2]};
    const Tiling tiling = tile_clips(s, g, s.out, s.out_channels, s.in, pad, zeros.data());
    const Weights weights = see_weights(w, s.out_channels, s.in_channels, true, s.kernel[0]);
    correlate({tiling, weights, s.in[1], s.in[2], factor, dx, false, nullptr}, threads);
}

// One time tap after the other: the gradient's frame i meets frame i + tap - padding, where there is one.
void run_grad_weight(const ConvShape& s, const s8* g, const s8* x, Factor factor, f32* dw, int threads) {
    const std::vector<s8> zeros(std::max(s.in_channels, s.out_channels), 0);
    const s64 row = s.taps() * s.in_channels;
    for (s64 tap = 0; tap < s.kernel[0]; ++tap) {
        const s64 ahead = tap - s.padding[0], first = std::max<s64>(0, -ahead), last = std::min(s.out[0], s.in[0] - ahead);
        const s64 met[3] = {std::max<s64>(0, last - first), s.out[1], s.out[2]};
        const s64 before_x[3] = {-(first + ahead), s.padding[1], s.padding[2]}, before_g[3] = {-first, 0, 0};
        const Tiling inputs = tile_clips(s, x, s.in, s.in_channels, met, before_x, zeros.data());
        const Tiling gradients = tile_clips(s, g, s.out, s.out_channels, met, before_g, zeros.data());
        grad_weight({inputs, gradients, factor, dw + tap * 9 * s.in_channels, row, false}, threads);
    }
}

}  // namespace
}  // namespace byteback
