// SPDX-License-Identifier: Apache-2.0
// A norm that uses its batch, pass after pass: the statistics of a convolution's output, the coefficients, and the pass that
// writes the results. For the bindings that run a block in one call (bindings_block.cpp, bindings_step.cpp).
#pragma once

#include <vector>

#include "bindings/structs.h"
#include "block/norm.h"
#include "block/norm_coefficients.h"
#include "conv/conv.h"

namespace byteback {
namespace {

// Room for Σ, Σ², min and max of each channel.
class OwnStatistics {
public:
    explicit OwnStatistics(s64 channels) : width_(static_cast<size_t>(channels)), sums_(2 * width_), ends_(2 * width_) {}
    Statistics places() { return {sums_.data(), sums_.data() + width_, ends_.data(), ends_.data() + width_}; }

private:
    size_t width_;
    std::vector<f64> sums_;
    std::vector<f32> ends_;
};

// What follows when the statistics are known.
inline void normalize_counted(int path, const ForwardPass& pass, const Statistics& seen_of, const BatchGiven& given,
                              const BatchMade& made, int threads) {
    const auto& [total, squares, low, high] = seen_of;
    f32* peak = at<f32>(made.peak);
    norm_coefficients({pass.channels, pass.rows, total, squares, low, high, at<const f32>(given.gamma),
                       at<const f32>(given.beta), at<const f32>(given.bias), given.eps, given.momentum,
                       at<f32>(given.running_mean), at<f32>(given.running_var), pass.ceiling, pass.floor},
                      {at<f32>(made.a), at<f32>(made.b), at<f64>(made.mean), at<f64>(made.invstd), peak});
    const Forward from = forward_of(pass, given.x, made.a, made.b, given.residual, given.residual_scale);
    if (made.values && !pass.peak_is_known) *peak = BYTEBACK_CALL(normalize_peak, from, threads);
    if (!made.values && !made.output && !made.mask && !made.kept) return;
    if (made.step) norm_steps(pass.channels, low, high, at<const f64>(made.mean), at<f32>(made.step), at<f32>(made.centre));
    const Outcome outcome{at<void>(made.output),
                          at<u8>(made.mask),
                          at<s8>(made.values),
                          made.values ? *peak : 0.0f,
                          at<void>(made.kept),
                          pass.kept,
                          at<const f32>(made.step),
                          at<const f32>(made.centre),
                          pass.pitch,
                          pass.output};
    const Report seen = BYTEBACK_CALL(normalize, from, outcome, threads);
    if (!made.values) return;
    write_scales(peak, 1, at<f32>(made.scale));
    write_counts(seen, made.counts);
}

// The same of a convolution's output, which is written to given.x and counted on the way where a kernel can. The kernel's name.
inline const char* conv_and_normalize(int path, const ConvShape& shape, const ForwardPass& pass, const Operands& operands,
                                      const BatchGiven& given, const BatchMade& made, int threads) {
    const GivenFactor factor(operands);
    OwnStatistics own(pass.channels);
    const Statistics s = own.places();
    const s8 *x = at<const s8>(operands.a), *w = at<const s8>(operands.b);
    void* y = at<void>(given.x);
    const Path chosen = static_cast<Path>(path);
    const char* kernel = conv_with_stats(chosen, shape, x, w, factor.get(), y, pass.x, s, threads);
    if (!kernel) {
        kernel = pass.x == Stored::bf16 ? conv_output_bf16(chosen, shape, x, w, factor.get(), static_cast<bf16*>(y), threads)
                                        : conv_output(chosen, shape, x, w, factor.get(), static_cast<f32*>(y), threads);
        BYTEBACK_CALL(channel_stats, pass.rows, pass.channels, y, pass.x, s.total, s.squares, s.low, s.high, threads);
    }
    normalize_counted(path, pass, s, given, made, threads);
    return kernel;
}

}  // namespace
}  // namespace byteback
