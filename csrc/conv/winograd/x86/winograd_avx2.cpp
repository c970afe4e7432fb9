// SPDX-License-Identifier: Apache-2.0
// Winograd on the AVX2 path (winograd_products.h has the algorithm): int16 multiplies, 6 rows at a time.
#include "core/avx2.h"
#include "conv/winograd/x86/winograd_vector_avx2.h"
#include "conv/winograd/x86/winograd_kernel_avx2.h"
// Made of the two above.
#include "conv/winograd/winograd_products.h"

namespace byteback::avx2 {

bool winograd_fits(const ConvShape& s) {
    for (int axis = 0; axis < 3; ++axis)
        if (s.stride[axis] != 1 || s.dilation[axis] != 1 || s.padding[axis] < 0 || s.in[axis] < 1 || s.out[axis] < 1)
            return false;
    if (s.kernel[0] < 1 || s.kernel[1] != 3 || s.kernel[2] != 3 || s.groups != 1) return false;
    // Sums over channels and time taps are int32.
    return s.in_channels > 0 && s.out_channels > 0 && s.taps() * std::max(s.in_channels, s.out_channels) <= kInt32Depth;
}

void winograd_output(const ConvShape& s, const s8* x, const s8* w, Factor factor, f32* y, int threads, const Epilogue* finish) {
    run_output(s, x, w, factor, y, threads, finish);
}

void winograd_grad_input(const ConvShape& s, const s8* g, const s8* w, Factor factor, f32* dx, int threads) {
    run_grad_input(s, g, w, factor, dx, threads);
}

void winograd_grad_weight(const ConvShape& s, const s8* g, const s8* x, Factor factor, f32* dw, int threads) {
    run_grad_weight(s, g, x, factor, dw, threads);
}

}  // namespace byteback::avx2
