// SPDX-License-Identifier: Apache-2.0
// The AVX-512 VNNI path: what it has of its own, and what it leaves to the AVX2 path.
#pragma once

#include "core/avx2.h"

namespace byteback::avx512vnni {

// Implicit GEMM, any convolution (gemm_avx512vnni.cpp).
void gemm_output(const ConvShape&, const s8* x, const s8* w, Factor, f32* y, int threads, const Epilogue* finish = nullptr);
void gemm_grad_input(const ConvShape&, const s8* g, const s8* w, Factor, f32* dx, int threads,
                     const Epilogue* finish = nullptr);
void gemm_grad_weight(const ConvShape&, const s8* g, const s8* x, Factor, f32* dw, int threads);

// Exact integer Winograd F(4x4,3x3), where avx2::winograd_fits (winograd_avx512vnni.cpp).
void winograd_output(const ConvShape&, const s8* x, const s8* w, Factor, f32* y, int threads, const Epilogue* finish = nullptr);
void winograd_grad_input(const ConvShape&, const s8* g, const s8* w, Factor, f32* dx, int threads);
void winograd_grad_weight(const ConvShape&, const s8* g, const s8* x, Factor, f32* dw, int threads);

// Direct convolution of images with one group (direct_avx512vnni.cpp), where these say so.
bool direct_output_fits(const ConvShape&);
bool direct_grad_input_fits(const ConvShape&);
void direct_output(const ConvShape&, const s8* x, const s8* w, Factor, f32* y, int threads, const Epilogue* finish = nullptr);
void direct_grad_input(const ConvShape&, const s8* g, const s8* w, Factor, f32* dx, int threads,
                       const Epilogue* finish = nullptr);

// The same for grad_weight, of multiples of 16 channels (direct_grad_weight_avx512vnni.cpp).
bool direct_grad_weight_fits(const ConvShape&);
void direct_grad_weight(const ConvShape&, const s8* g, const s8* x, Factor, f32* dw, int threads);

// One input channel per output channel (depthwise_avx512vnni.cpp). plan.cpp uses them for multiples of 32 channels.
bool depthwise_fits(const ConvShape&);
void depthwise_output(const ConvShape&, const s8* x, const s8* w, Factor, f32* y, int threads,
                      const Epilogue* finish = nullptr);
void depthwise_grad_input(const ConvShape&, const s8* g, const s8* w, Factor, f32* dx, int threads);
void depthwise_grad_weight(const ConvShape&, const s8* g, const s8* x, Factor, f32* dw, int threads);

Report quantize(const Rows&, const f32* x, PerScale clip, Noise, s8* q, int threads);
void channel_cosine_terms(const Rows&, const f32* x, CandidateClips, bool stochastic, f64* terms, int threads);
void cosine_terms(const Rows&, const f32* x, CandidateClips, bool stochastic, f64* terms, int threads);

// AVX2's, whose times these are divided by those of 512-bit vectors, on a Zen 4 (which halves 512-bit instructions), one
// thread, in the caches: they load more than they compute, or turn tiles.
using avx2::absmax;              // 0.94 to 1.03
using avx2::absmax_outer;        // 0.91 to 1.00
using avx2::cosine_slope_terms;  // 0.69 to 1.13
using avx2::dot_terms;           // 0.77 to 1.15
using avx2::moments;             // 0.74 to 1.13
using avx2::tail_count;          // 0.65 to 1.07
using avx2::transpose;

}  // namespace byteback::avx512vnni
