// SPDX-License-Identifier: Apache-2.0
// The arithmetic of a norm per channel (src/byteback/ops/norm.py has the formulas): a few hundred float64 operations, which
// would take longer in PyTorch than the pass of a small layer. All paths use this code.
#pragma once

#include "core/types.h"

namespace byteback {

struct NormInput {
    s64 channels, count;             // count: pixels
    const f64 *total, *squares;      // sums of each channel
    const f32 *low, *high;           // its extremes
    const f32 *gamma, *beta, *bias;  // null where there is none; bias is the convolution's
    f64 eps, momentum;
    f32 *running_mean, *running_var;  // null where they are not tracked
    f32 ceiling;                      // of the activation: 6 or infinity
    bool floor;                       // whether the activation cuts at 0
};

struct NormOutput {
    f32 *a, *b;
    f64 *mean, *invstd;
    f32* peak;  // max|act(a·x + b)| by the extremes
};

void norm_coefficients(const NormInput&, const NormOutput&);

// How x is kept as int8 (ops.pack_norm): around its mean, 127 steps to the farther extreme of each channel.
void norm_steps(s64 channels, const f32* low, const f32* high, const f64* mean, f32* step, f32* centre);

// A norm whose statistics are given: a and b only.
struct GivenNorm {
    s64 channels;
    const f32 *mean, *var, *gamma, *beta, *bias;  // gamma, beta and bias null where there is none
    f64 eps;
};

void norm_folded(const GivenNorm&, f32* a, f32* b);

// 1 / sqrt(var + eps), for the backward pass of such a norm.
void norm_invstd(s64 channels, const f32* var, f64 eps, f64* invstd);

struct NormSums {
    s64 channels, count;
    const f32* a;
    const f64 *mean, *invstd, *total, *dot;
};

struct NormGradient {
    f32 *q, *r, *gamma, *beta;
};

void norm_gradient(const NormSums&, const NormGradient&);

// Σdx and Σdx² of dx = a·g + q·x + r for each channel, from sums of g and the statistics of x.
struct GradientSums {
    NormSums of;
    const f64* squares;  // Σg²
    const f32 *q, *r;
    f64 eps;
};

void gradient_sums(const GradientSums&, f64* total, f64* squares);

}  // namespace byteback
