// SPDX-License-Identifier: Apache-2.0
// Direct convolution on the AVX-512 VNNI path: output and grad_input.
#include "core/avx512vnni.h"
#include "conv/gemm/x86/gemm_micro_avx512vnni.h"
#include "conv/direct/x86/direct_micro_avx512vnni.h"
// Made of the two above.
#include "conv/direct/direct.h"

namespace byteback::avx512vnni {

bool direct_output_fits(const ConvShape& s) { return direct_fits_output(s); }
bool direct_grad_input_fits(const ConvShape& s) { return direct_fits_grad_input(s); }

void direct_output(const ConvShape& s, const s8* x, const s8* w, Factor factor, f32* y, int threads, const Epilogue* finish) {
    run_direct_output<OffsetQuads, DirectMicro>(s, x, w, factor, y, threads, finish);
}

void direct_grad_input(const ConvShape& s, const s8* g, const s8* w, Factor factor, f32* dx, int threads,
                       const Epilogue* finish) {
    run_direct_grad_input<OffsetQuads, DirectMicro>(s, g, w, factor, dx, threads, finish);
}

}  // namespace byteback::avx512vnni
