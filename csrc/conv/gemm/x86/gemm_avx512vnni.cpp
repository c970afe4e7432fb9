// SPDX-License-Identifier: Apache-2.0
// Convolution as a matrix product on the AVX-512 VNNI path: one multiply kernel for all signs.
#include "core/avx512vnni.h"
#include "conv/gemm/x86/gemm_micro_avx512vnni.h"
// Made of the one above.
#include "conv/gemm/gemm_grad_weight.h"
#include "conv/gemm/gemm_phases.h"

namespace byteback::avx512vnni {

void gemm_output(const ConvShape& s, const s8* x, const s8* w, Factor factor, f32* y, int threads, const Epilogue* finish) {
    run_output<OffsetQuads>(s, x, w, factor, y, threads, finish);
}

void gemm_grad_input(const ConvShape& s, const s8* g, const s8* w, Factor factor, f32* dx, int threads,
                     const Epilogue* finish) {
    run_strided_grad_input<OffsetQuads>(s, g, w, factor, dx, threads, finish);
}

void gemm_grad_weight(const ConvShape& s, const s8* g, const s8* x, Factor factor, f32* dw, int threads) {
    run_grad_weight<OffsetQuads>(s, g, x, factor, dw, threads);
}

}  // namespace byteback::avx512vnni
