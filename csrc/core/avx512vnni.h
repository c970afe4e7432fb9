// SPDX-License-Identifier: Apache-2.0
// The AVX-512 VNNI path: the matrix products and Winograd, by instructions that multiply and add in one. Everything else is the
// AVX2 path's.
#pragma once

#include "core/types.h"

namespace byteback {
struct Epilogue;  // epilogue.h
}

namespace byteback::avx512vnni {

// Implicit GEMM, any convolution (gemm_avx512vnni.cpp).
void gemm_output(const ConvShape&, const s8* x, const s8* w, Factor, f32* y, int threads, const Epilogue* finish = nullptr);
void gemm_grad_input(const ConvShape&, const s8* g, const s8* w, Factor, f32* dx, int threads);
void gemm_grad_weight(const ConvShape&, const s8* g, const s8* x, Factor, f32* dw, int threads);

// Exact integer Winograd F(4x4,3x3), where avx2::winograd_fits (winograd_avx512vnni.cpp).
void winograd_output(const ConvShape&, const s8* x, const s8* w, Factor, f32* y, int threads, const Epilogue* finish = nullptr);
void winograd_grad_input(const ConvShape&, const s8* g, const s8* w, Factor, f32* dx, int threads);
void winograd_grad_weight(const ConvShape&, const s8* g, const s8* x, Factor, f32* dw, int threads);

}  // namespace byteback::avx512vnni
