// SPDX-License-Identifier: Apache-2.0
// Convolution as a matrix product on the AVX2 path: which multiply kernel is used.
#include "core/avx2.h"
#include "conv/gemm/x86/gemm_micro_avx2.h"
// Made of the one above.
#include "conv/gemm/gemm_grad_weight.h"
#include "conv/gemm/gemm_phases.h"

namespace byteback::avx2 {

void gemm_output(const ConvShape& s, const s8* x, const s8* w, Factor factor, f32* y, bool nonnegative, int threads,
                 const Epilogue* finish) {
    if (nonnegative)
        run_output<UnsignedQuads>(s, x, w, factor, y, threads, finish);
    else
        run_output<SignedPairs>(s, x, w, factor, y, threads, finish);
}

void gemm_grad_input(const ConvShape& s, const s8* g, const s8* w, Factor factor, f32* dx, int threads,
                     const Epilogue* finish) {
    run_strided_grad_input<SignedPairs>(s, g, w, factor, dx, threads, finish);
}

void gemm_grad_weight(const ConvShape& s, const s8* g, const s8* x, Factor factor, f32* dw, bool nonnegative, int threads) {
    if (nonnegative)
        run_grad_weight<UnsignedQuads>(s, g, x, factor, dw, threads);
    else
        run_grad_weight<SignedPairs>(s, g, x, factor, dw, threads);
}

}  // namespace byteback::avx2
