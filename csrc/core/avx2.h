// SPDX-License-Identifier: Apache-2.0
// The AVX2 path. Same words as generic.h; the three products come in several algorithms, among which plan.cpp chooses.
#pragma once

#include "core/elementwise.h"
#include "core/types.h"

namespace byteback {
struct Epilogue;  // epilogue.h
}

namespace byteback::avx2 {

// Implicit GEMM, any convolution (gemm_avx2.cpp). `nonnegative`: no value of x is negative, so u8·s8 multiplies are exact.
void gemm_output(const ConvShape&, const s8* x, const s8* w, Factor, f32* y, bool nonnegative, int threads,
                 const Epilogue* finish = nullptr);
void gemm_grad_input(const ConvShape&, const s8* g, const s8* w, Factor, f32* dx, int threads,
                     const Epilogue* finish = nullptr);
void gemm_grad_weight(const ConvShape&, const s8* g, const s8* x, Factor, f32* dw, bool nonnegative, int threads);

// Exact integer Winograd F(4x4,3x3): kernels of 3x3 in space and any number of time taps, stride and dilation 1
// (winograd_avx2.cpp).
bool winograd_fits(const ConvShape&);
void winograd_output(const ConvShape&, const s8* x, const s8* w, Factor, f32* y, int threads, const Epilogue* finish = nullptr);
void winograd_grad_input(const ConvShape&, const s8* g, const s8* w, Factor, f32* dx, int threads);
void winograd_grad_weight(const ConvShape&, const s8* g, const s8* x, Factor, f32* dw, int threads);

// One input channel per output channel: groups == C == K (depthwise_avx2.cpp).
bool depthwise_fits(const ConvShape&);
void depthwise_output(const ConvShape&, const s8* x, const s8* w, Factor, f32* y, int threads,
                      const Epilogue* finish = nullptr);
void depthwise_grad_input(const ConvShape&, const s8* g, const s8* w, Factor, f32* dx, int threads);
void depthwise_grad_weight(const ConvShape&, const s8* g, const s8* x, Factor, f32* dw, int threads);

// Whether any of n bytes is negative; stops at the first block that has one (quantize_avx2.cpp).
bool any_negative(const s8* values, s64 n, int threads);

Report quantize(const Rows&, const f32* x, PerScale clip, Noise, s8* q, int threads);
void absmax(const Rows&, const f32* x, f32* per_channel, int threads);
void absmax_outer(const Rows&, const f32* x, f32* per_outer, int threads);
void moments(const Rows&, const f32* x, f32* peak, f64* sum, f64* squares, int threads);
void tail_count(const Rows&, const f32* x, PerScale threshold, s64* counts, int threads);
void channel_cosine_terms(const Rows&, const f32* x, CandidateClips, bool stochastic, f64* terms, int threads);
void cosine_terms(const Rows&, const f32* x, CandidateClips, bool stochastic, f64* terms, int threads);
void cosine_slope_terms(const Rows&, const f32* x, f32 clip, f64* terms, int threads);
void dot_terms(const Rows&, const f32* x, const s8* q, PerScale scale, f64* terms, int threads);
void transpose(const Matrices&, const u8* from, u8* to, int threads);
void transpose(const Matrices&, const u32* from, u32* to, int threads);

}  // namespace byteback::avx2
