// SPDX-License-Identifier: Apache-2.0
#include "block/norm_coefficients.h"

#include <cmath>

#include "elementwise/rows.h"

namespace byteback {

namespace {

f32 magnitude(f32 end, const NormInput& in) {
    if (in.floor && end < 0.0f) end = 0.0f;
    if (end > in.ceiling) end = in.ceiling;
    return std::fabs(end);
}

// Each of the three operations is rounded once: sqrt is an instruction (or libm's, which is as exact).
f64 inverse_deviation(f64 var, f64 eps) { return 1.0 / std::sqrt(var + eps); }

}  // namespace

void norm_coefficients(const NormInput& in, const NormOutput& out) {
    const f64 count = static_cast<f64>(in.count);
    const f64 unbiased = in.count > 1 ? count / static_cast<f64>(in.count - 1) : 0.0;
    const f32 keep = static_cast<f32>(1.0 - in.momentum), take = static_cast<f32>(in.momentum);
    f32 peak = 0.0f;
    for (s64 c = 0; c < in.channels; ++c) {
        const f64 mean = in.total[c] / count;
        f64 var = in.squares[c] / count - mean * mean;
        if (var < 0.0) var = 0.0;
        if (in.running_mean) {
            const f32 seen = static_cast<f32>(in.bias ? mean + static_cast<f64>(in.bias[c]) : mean);
            in.running_mean[c] = in.running_mean[c] * keep + seen * take;
            in.running_var[c] = in.running_var[c] * keep + static_cast<f32>(var * unbiased) * take;
        }
        const f64 invstd = inverse_deviation(var, in.eps);
        const f32 a = static_cast<f32>(in.gamma ? static_cast<f64>(in.gamma[c]) * invstd : invstd);
        const f64 shift = mean * static_cast<f64>(a);
        const f32 b = static_cast<f32>(in.beta ? static_cast<f64>(in.beta[c]) - shift : -shift);
        out.a[c] = a;
        out.b[c] = b;
        out.mean[c] = mean;
        out.invstd[c] = invstd;
        const f32 low = in.low[c] * a, high = in.high[c] * a;
        peak = larger(peak, larger(magnitude(low + b, in), magnitude(high + b, in)));
    }
    *out.peak = peak;
}

void norm_steps(s64 channels, const f32* low, const f32* high, const f64* mean, f32* step, f32* centre) {
    for (s64 c = 0; c < channels; ++c) {
        centre[c] = static_cast<f32>(mean[c]);
        const f32 reach = larger(std::fabs(low[c] - centre[c]), std::fabs(high[c] - centre[c]));
        step[c] = scale_of(reach);
    }
}

void norm_folded(const GivenNorm& in, f32* to_a, f32* to_b) {
    for (s64 c = 0; c < in.channels; ++c) {
        const f64 bias = in.bias ? static_cast<f64>(in.bias[c]) : 0.0, given = static_cast<f64>(in.mean[c]);
        const f64 mean = in.bias ? given - bias : given;
        const f64 invstd = inverse_deviation(static_cast<f64>(in.var[c]), in.eps);
        const f32 a = static_cast<f32>(in.gamma ? static_cast<f64>(in.gamma[c]) * invstd : invstd);
        const f64 shift = mean * static_cast<f64>(a);
        to_a[c] = a;
        to_b[c] = static_cast<f32>(in.beta ? static_cast<f64>(in.beta[c]) - shift : -shift);
    }
}

void norm_invstd(s64 channels, const f32* var, f64 eps, f64* invstd) {
    for (s64 c = 0; c < channels; ++c) invstd[c] = inverse_deviation(static_cast<f64>(var[c]), eps);
}

void norm_gradient(const NormSums& in, const NormGradient& out) {
    const f64 share = -1.0 / static_cast<f64>(in.count);
    for (s64 c = 0; c < in.channels; ++c) {
        const f64 a = static_cast<f64>(in.a[c]);
        const f64 gamma = (in.dot[c] - in.mean[c] * in.total[c]) * in.invstd[c];
        const f32 q = static_cast<f32>(a * in.invstd[c] * gamma * share);
        out.q[c] = q;
        out.r[c] = static_cast<f32>(a * in.total[c] * share - static_cast<f64>(q) * in.mean[c]);
        out.gamma[c] = static_cast<f32>(gamma);
        out.beta[c] = static_cast<f32>(in.total[c]);
    }
}

void gradient_sums(const GradientSums& in, f64* to_total, f64* to_squares) {
    const f64 count = static_cast<f64>(in.of.count);
    for (s64 c = 0; c < in.of.channels; ++c) {
        const f64 a = static_cast<f64>(in.of.a[c]), q = static_cast<f64>(in.q[c]), r = static_cast<f64>(in.r[c]);
        const f64 mean = in.of.mean[c], invstd = in.of.invstd[c], total = in.of.total[c];
        f64 var = 1.0 / (invstd * invstd) - in.eps;
        if (var < 0.0) var = 0.0;
        const f64 shift = q * mean + r, centred = in.of.dot[c] - mean * total;
        to_total[c] = a * total + count * shift;
        const f64 own = (a * a * in.squares[c] + count * (q * q * var)) + count * (shift * shift);
        const f64 crossed = a * q * centred + a * shift * total;
        to_squares[c] = own + 2.0 * crossed;
    }
}

}  // namespace byteback
