// SPDX-License-Identifier: Apache-2.0
#include "conv/plan.h"

#ifdef BYTEBACK_AVX2
#include "core/avx2.h"
#endif
#ifdef BYTEBACK_AVX512VNNI
#include "core/avx512vnni.h"
#endif

namespace byteback {
#ifdef BYTEBACK_AVX2
namespace {

constexpr s64 kDepthwiseVector = 32;  // channels of AVX-512's depthwise kernels; other numbers of them are left to AVX2's

constexpr s64 kBandBytes = 512 << 10;  // of the source that a row of the result meets, for direct convolution

// A Winograd tile makes 4x4 pixels, of which small images throw some away. With AVX2 that leaves Winograd ahead of the matrix
// product but for images of one or two pixels. With AVX-512 VNNI the matrix product is twice as fast; measured there, as times
// of Winograd, by the part of the tiles that is used:
//
//     all (4x4) 1.5    0.77 (7x7) 1.25    0.56 (3x3, 9x9) 1.0    0.39 (5x5) 0.7    0.25 (2x2) 0.5
//
// and with 512 channels, where transforming the weights is most of the work, 1 tile 0.5, 4 tiles 0.95, 8 tiles 1.1 to 1.4.
bool winograd_pays(const ConvShape& shape, ProductKind kind, Path path) {
    const s64* image = kind == ProductKind::grad_input ? shape.in : shape.out;
    const s64 pixels = image[1] * image[2], tiles = ceil_div(image[1], 4) * ceil_div(image[2], 4);
    if (path != Path::avx512vnni) return shape.out[1] * shape.out[2] > 2;
    return 2 * pixels > 16 * tiles && shape.batch * image[0] * tiles >= 6;
}

#ifdef BYTEBACK_AVX512VNNI
// Direct convolution copies the source once, where the matrix product gathers it tap by tap and Winograd transforms it.
// Measured on a Zen 5 with full-width vectors, one thread and two, output and grad_input:
//
//     as times of the matrix product, kernels of 3x3 to 7x7, 1x7 and 7x1, stride 1 and 2
//         3 channels 1.3 to 2.6    16 and 32 channels 1.3 to 3    48 to 128 1.0 to 1.5    192 to 512 1.0 to 1.2
//     as times of Winograd, equal numbers of channels, by images
//         tiles all used (8x8, 16x16, 32x32)  16 channels 0.95, 1.2, 1.3   32: 1.1, 1.3, 1.3   48: 1.1   64: 0.95, 0.95, 0.9
//         0.77 used (7x7, 14x14)              16 channels 1.1, 1.3         64: 1.2, 1.3   96: 1.1, 1.2   128: 1.0, 1.15
//         4x4                                 16 channels 0.8              32: 0.8    64: 0.8
//     32 channels to 16: 0.85, 64 to 16: 0.95 (half of a block's columns are empty)
//     with results of 1 MB and less, 16 and 32 channels 0.9: Winograd's tiles stay in the second-level cache too
//
// It is slower than the matrix product where rows are so short that a block has few pixels (0.8 for 2x2, 0.95 for 5x5 with 512
// channels), where the work is mostly to pack weights (one image of 7x7: 0.85), and where taps do not overlap.
bool direct_beats_gemm(const ConvShape& shape, ProductKind kind) {
    const bool output = kind == ProductKind::output;
    const s64* source = output ? shape.in : shape.out;
    const s64 channels = output ? shape.in_channels : shape.out_channels;
    const s64 lines = output ? shape.out[1] : shape.in[1] / shape.stride[1];
    const s64 row = output ? shape.out[2] : shape.in[2] / shape.stride[2];
    const s64 reach = 1 + (shape.kernel[1] - 1) * shape.dilation[1],
              width = source[2] + (shape.kernel[2] - 1) * shape.dilation[2];
    if (shape.kernel[1] <= shape.stride[1] && shape.kernel[2] <= shape.stride[2]) return false;
    return channels <= 512 && row >= (channels <= 128 ? 4 : 7) &&
           shape.batch * lines * row >= (channels <= 64 ? 32 : channels / 2) && reach * width * channels <= kBandBytes;
}

bool direct_beats_winograd(const ConvShape& shape, ProductKind kind) {
    const bool output = kind == ProductKind::output;
    const s64* image = output ? shape.out : shape.in;
    const s64 C = output ? shape.in_channels : shape.out_channels, K = output ? shape.out_channels : shape.in_channels;
    const s64 pixels = image[1] * image[2], tiles = ceil_div(image[1], 4) * ceil_div(image[2], 4);
    if (tiles < (K <= 16 ? 9 : 4) || (K <= 16 && C > 16)) return false;
    const s64 floats = shape.batch * pixels * K;
    if (floats < (5 * pixels <= 4 * 16 * tiles ? 1 << 17 : 1 << 19)) return false;
    const f64 used = static_cast<f64>(pixels) / static_cast<f64>(16 * tiles);
    return used * used * static_cast<f64>(C * K) <= static_cast<f64>(29 * (C + K));
}

// Direct grad_weight interleaves the operands once for all rows of taps, the matrix product once for every tap. Measured on a
// Zen 5 with full-width vectors, two threads, as times of the matrix product, images of 8x8 to 56x56:
//
//     3x3 with stride 2      16 channels to 32: 2 to 4    32 to 64: 1.4 to 2    64 to 128: 1.0 to 1.9    96 and 128: 1.2 to 1.4
//     5x5, 1x7, 7x1          16 channels 3.4 to 7         32: 1.9 to 3       48 to 64: 1.5 to 1.7    96 and 128: 1.05 to 1.2
//     1x1                    16 channels 1.4 to 6         16 to 64: 1.1 to 3    64: 1.1 to 1.6 (images of 14x14 and more)
//
// and slower where a row has few quads (outputs of 2x2: 0.4 to 0.9; of 4x4: 1.0 with 64 channels, 0.85 with 128), and where the
// sums are many for the pixels (128 channels to 256: 1.4 with 8192 pixels, 0.97 with 1568; 256 to 512 0.9).
bool direct_grad_weight_beats_gemm(const ConvShape& shape) {
    const s64 products = shape.in_channels * shape.out_channels, row = shape.out[2], lines = shape.out[1];
    if (shape.taps() == 1) return row >= 4 && (products <= 1024 || (row >= 14 && products <= 8192));
    const s64 sums = 4 * products * shape.taps(), pixels = shape.batch * shape.in[0] * lines * row;
    if (sums > 1'200'000 || sums > 200 * pixels || row < 3) return false;
    return products <= 2048 || (lines * row > 16 && 4 * row >= 3 * round_up(row, 4));
}

// As times of Winograd, images of 10x10 to 56x56: 16 channels 1.15 to 1.5, 16 to 32 and 64 1.1 to 1.4, 32 1.0 to 1.4; with 48
// and 64 channels 1.1 to 1.3 where Winograd's tiles are not all used (10x10, 14x14, 17x17), else 0.9 to 1.1. Images of up to
// 8x8: 0.7 to 1.05.
bool direct_grad_weight_beats_winograd(const ConvShape& shape) {
    const s64 C = shape.in_channels, K = shape.out_channels, least = C < K ? C : K, row = shape.out[2], lines = shape.out[1];
    if ((C > K ? C : K) > 64 || row < 9 || lines < 9 || 36 * C * K > 200 * shape.batch * lines * row) return false;
    if (least == 16 || (least == 32 && row >= 20)) return true;
    return lines * row <= 14 * ceil_div(lines, 4) * ceil_div(row, 4);
}

bool direct_grad_weight_pays(const ConvShape& shape) {
    if (!avx512vnni::direct_grad_weight_fits(shape)) return false;
    return avx2::winograd_fits(shape) && winograd_pays(shape, ProductKind::grad_weight, Path::avx512vnni)
               ? direct_grad_weight_beats_winograd(shape)
               : direct_grad_weight_beats_gemm(shape);
}

bool direct_pays(const ConvShape& shape, ProductKind kind, Path path) {
    if (path != Path::avx512vnni) return false;
    if (kind == ProductKind::grad_weight) return direct_grad_weight_pays(shape);
    const bool fits =
        kind == ProductKind::output ? avx512vnni::direct_output_fits(shape) : avx512vnni::direct_grad_input_fits(shape);
    if (!fits || !direct_beats_gemm(shape, kind)) return false;
    return !avx2::winograd_fits(shape) || !winograd_pays(shape, kind, path) || direct_beats_winograd(shape, kind);
}

// Of the block that a matrix product multiplies in registers, by its columns (gemm_multiply_avx512vnni.h).
const char* reason_of_vnni(s64 columns) {
    if (columns > 16)
        return "implicit GEMM; u8·s8 multiplies, with an offset of 128 that is taken off again; 512-bit blocks of 14x32";
    if (columns > 8)
        return "implicit GEMM; u8·s8 multiplies, with an offset of 128 that is taken off again; 512-bit blocks of 14x16";
    return "implicit GEMM; u8·s8 multiplies, with an offset of 128 that is taken off again; 256-bit blocks of 14x8";
}
#endif

}  // namespace
#endif

Plan make_plan(const ConvShape& shape, ProductKind kind, Path path) {
    if (path == Path::generic) return {Algorithm::direct, false, "the generic path has one algorithm, the textbook's"};
#ifdef BYTEBACK_AVX2
    if (avx2::depthwise_fits(shape))
        return {path == Path::avx512vnni && shape.in_channels % kDepthwiseVector == 0 ? Algorithm::depthwise_vnni
                                                                                      : Algorithm::depthwise,
                false, "one input channel per output channel: memory traffic decides, not arithmetic"};
#ifdef BYTEBACK_AVX512VNNI
    if (direct_pays(shape, kind, path))
        return {Algorithm::direct_vnni, false,
                kind == ProductKind::grad_weight ? "few channels: pixels packed once for all rows of taps; u8·s8 multiplies"
                                                 : "few channels: reads every tap in place; u8·s8 multiplies, 512-bit blocks"};
#endif
    if (avx2::winograd_fits(shape) && winograd_pays(shape, kind, path))
        return {path == Path::avx512vnni ? Algorithm::winograd_vnni : Algorithm::winograd, false,
                shape.kernel[0] == 1 ? "3x3 with stride 1: Winograd F(4x4,3x3) needs a quarter of the multiplications"
                                     : "3x3 in space with stride 1: Winograd F(4x4,3x3), summed over the time taps"};
#ifdef BYTEBACK_AVX512VNNI
    if (path == Path::avx512vnni)
        return {Algorithm::gemm_vnni, false,
                reason_of_vnni(kind == ProductKind::grad_input ? shape.group_in() : shape.group_out())};
#endif
    if (kind == ProductKind::grad_input)
        return {Algorithm::gemm, false, "implicit GEMM; gradients and weights are signed, so int16 multiplies"};
    return {Algorithm::gemm, true, "implicit GEMM; u8·s8 multiplies if no input is negative, else int16"};
#else
    (void)shape;
    (void)kind;
    return {Algorithm::direct, false, "this build has no AVX2 kernels"};
#endif
}

const char* name_of(Algorithm algorithm) {
    switch (algorithm) {
        case Algorithm::direct: return "direct";
        case Algorithm::direct_vnni: return "direct_vnni";
        case Algorithm::gemm: return "gemm";
        case Algorithm::gemm_vnni: return "gemm_vnni";
        case Algorithm::winograd: return "winograd";
        case Algorithm::winograd_vnni: return "winograd_vnni";
        case Algorithm::depthwise: return "depthwise";
        case Algorithm::depthwise_vnni: return "depthwise_vnni";
    }
    return "?";
}

}  // namespace byteback
