// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#ifdef BYTEBACK_AVX2
#include "avx2.h"
#endif
#ifdef BYTEBACK_AVX512VNNI
#include "avx512vnni.h"
#endif

namespace byteback {

Plan make_plan(const ConvShape& shape, ProductKind kind, Path path) {
    if (path == Path::generic) return {Algorithm::direct, false, "the generic path has one algorithm, the textbook's"};
#ifdef BYTEBACK_AVX2
    if (avx2::depthwise_fits(shape))
        return {Algorithm::depthwise, false, "one input channel per output channel: memory traffic decides, not arithmetic"};
    // A tile makes 4x4 pixels: of an image of one or two it would throw most away.
    if (avx2::winograd_fits(shape) && shape.out[1] * shape.out[2] > 2)
        return {path == Path::avx512vnni ? Algorithm::winograd_vnni : Algorithm::winograd, false,
                "3x3 with stride 1: Winograd F(4x4,3x3) needs a quarter of the multiplications"};
#ifdef BYTEBACK_AVX512VNNI
    if (path == Path::avx512vnni && avx512vnni::gemm_fits(shape))
        return {Algorithm::gemm_vnni, false, "implicit GEMM; u8·s8 multiplies, with an offset of 128 that is taken off again"};
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
    }
    return "?";
}

}  // namespace byteback
