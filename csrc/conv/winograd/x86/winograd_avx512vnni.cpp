// SPDX-License-Identifier: Apache-2.0
// Winograd on the AVX-512 VNNI path (winograd_products.h has the algorithm): vectors of 64 bytes, blocks of 24 of them.
#include "core/avx512vnni.h"
#include "conv/winograd/x86/winograd_vector_avx512vnni.h"
#include "conv/winograd/x86/winograd_kernel_avx512vnni.h"
// Made of the two above.
#include "conv/winograd/winograd_products.h"

namespace byteback::avx512vnni {

void winograd_output(const ConvShape& s, const s8* x, const s8* w, Factor factor, f32* y, int threads, const Epilogue* finish) {
    run_output(s, x, w, factor, y, threads, finish);
}

void winograd_grad_input(const ConvShape& s, const s8* g, const s8* w, Factor factor, f32* dx, int threads) {
    run_grad_input(s, g, w, factor, dx, threads);
}

void winograd_grad_weight(const ConvShape& s, const s8* g, const s8* x, Factor factor, f32* dw, int threads) {
    run_grad_weight(s, g, x, factor, dw, threads);
}

}  // namespace byteback::avx512vnni
