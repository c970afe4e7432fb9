// SPDX-License-Identifier: Apache-2.0
// The generic path: portable textbook C++. The page to read first, and what every other path is compared with.
//
// Activations are NHWC, weights and their gradients KRSC, all dense. The result never depends on `threads`.
#pragma once

#include "core/elementwise.h"
#include "core/types.h"

namespace byteback::generic {

void conv_output(const ConvShape&, const s8* x, const s8* w, Factor, f32* y, int threads);
void conv_grad_input(const ConvShape&, const s8* g, const s8* w, Factor, f32* dx, int threads);
void conv_grad_weight(const ConvShape&, const s8* g, const s8* x, Factor, f32* dw, int threads);

// q has the strides of x. The scale is not written here: scale = clip / 127 (1 where the clip counts as 0) is a few floats.
Report quantize(const Rows&, const f32* x, PerScale clip, Noise, s8* q, int threads);
// max|x| per channel (or per sample); NaN if any element is NaN.
void absmax(const Rows&, const f32* x, f32* per_channel, int threads);
void absmax_outer(const Rows&, const f32* x, f32* per_outer, int threads);
// Per channel max|x|, Σx and Σx², the sums in float64 with the contract's order of additions.
void moments(const Rows&, const f32* x, f32* peak, f64* sum, f64* squares, int threads);
// Per channel, how many |x| exceed the threshold.
void tail_count(const Rows&, const f32* x, PerScale threshold, s64* counts, int threads);
// For each candidate the sums x·q, q·q and x·x of each channel, terms[candidate][3][channel]: with q rounded to nearest, or,
// `stochastic`, as expected of a q that is rounded stochastically.
void channel_cosine_terms(const Rows&, const f32* x, CandidateClips, bool stochastic, f64* terms, int threads);
// The same summed over the channels, terms[candidate][3].
void cosine_terms(const Rows&, const f32* x, CandidateClips, bool stochastic, f64* terms, int threads);
// (x·q, q·q, x·x, x·d, q·d) for one clip: the slope of the cosine (ops/statistics.py, cosine_slope_terms).
void cosine_slope_terms(const Rows&, const f32* x, f32 clip, f64* terms, int threads);
// (x·x̂, x̂·x̂, x·x) with x̂ = q * scale in float64.
void dot_terms(const Rows&, const f32* x, const s8* q, PerScale scale, f64* terms, int threads);
// Activations from one memory format to the other (transpose_generic.cpp).
void transpose(const Matrices&, const u8* from, u8* to, int threads);
void transpose(const Matrices&, const u32* from, u32* to, int threads);

}  // namespace byteback::generic
