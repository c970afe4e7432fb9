// SPDX-License-Identifier: Apache-2.0
#include "conv/plan.h"

#ifdef BYTEBACK_AVX2
#include "core/avx2.h"
#endif

namespace byteback {
#ifdef BYTEBACK_AVX2
namespace {

constexpr s64 kDepthwiseVector = 32;  // channels of AVX-512's depthwise kernels; other numbers of them are left to AVX2's

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
