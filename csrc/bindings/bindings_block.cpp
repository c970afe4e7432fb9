// SPDX-License-Identifier: Apache-2.0
// The passes of norm.h for a training step, one call for each direction of a block (ops/backends/cpu/block.py, block_grad.py):
// between two passes there is little arithmetic, and a return to Python would take longer. Also the pools. An address of 0
// means that there is no tensor.
#include <nanobind/nanobind.h>

#include <vector>

#include "bindings/structs.h"
#include "block/max_pool.h"
#include "block/norm.h"
#include "block/norm_coefficients.h"
#include "block/pixels.h"
#include "conv/conv.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace byteback;

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
void normalize_counted(int path, const ForwardPass& pass, const Statistics& seen_of, const BatchGiven& given,
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
    const Outcome outcome{at<f32>(made.output),       at<u8>(made.mask),          at<s8>(made.values),
                          made.values ? *peak : 0.0f, at<void>(made.kept),        pass.kept,
                          at<const f32>(made.step),   at<const f32>(made.centre), pass.pitch};
    const Report seen = BYTEBACK_CALL(normalize, from, outcome, threads);
    if (!made.values) return;
    write_scales(peak, 1, at<f32>(made.scale));
    write_counts(seen, made.counts);
}

void normalize_batch(int path, const ForwardPass& pass, const BatchGiven& given, const BatchMade& made, int threads) {
    nb::gil_scoped_release unlocked;
    OwnStatistics own(pass.channels);
    const Statistics s = own.places();
    BYTEBACK_CALL(channel_stats, pass.rows, pass.channels, at<const f32>(given.x), s.total, s.squares, s.low, s.high, threads);
    normalize_counted(path, pass, s, given, made, threads);
}

// The same of a convolution's output, which is written to given.x and counted on the way where a kernel can. The kernel's name.
const char* conv_normalize_batch(int path, const ConvShape& shape, const ForwardPass& pass, const Operands& operands,
                                 const BatchGiven& given, const BatchMade& made, int threads) {
    nb::gil_scoped_release unlocked;
    const GivenFactor factor(operands);
    OwnStatistics own(pass.channels);
    const Statistics s = own.places();
    const s8 *x = at<const s8>(operands.a), *w = at<const s8>(operands.b);
    f32* y = at<f32>(given.x);
    const Path chosen = static_cast<Path>(path);
    const char* kernel = conv_with_stats(chosen, shape, x, w, factor.get(), y, s, threads);
    if (!kernel) {
        kernel = conv_output(chosen, shape, x, w, factor.get(), y, threads);
        BYTEBACK_CALL(channel_stats, pass.rows, pass.channels, y, s.total, s.squares, s.low, s.high, threads);
    }
    normalize_counted(path, pass, s, given, made, threads);
    return kernel;
}

// dx_total and dx_squares: both or neither.
void normalize_grad_batch(int path, const Backward& from, f64 eps, Address a, Address mean, Address invstd, Address q,
                          Address r, Address grad_gamma, Address grad_beta, Address masked, Address dx_total,
                          Address dx_squares, int threads) {
    nb::gil_scoped_release unlocked;
    std::vector<f64> sums(3 * static_cast<size_t>(from.channels));
    f64 *total = sums.data(), *dot = total + from.channels, *squares = dx_total ? dot + from.channels : nullptr;
    BYTEBACK_CALL(normalize_grad_sums, from, total, dot, squares, at<f32>(masked), threads);
    const NormSums seen{from.channels, from.rows, at<const f32>(a), at<const f64>(mean), at<const f64>(invstd), total, dot};
    norm_gradient(seen, {at<f32>(q), at<f32>(r), at<f32>(grad_gamma), at<f32>(grad_beta)});
    if (squares)
        gradient_sums({seen, squares, at<const f32>(q), at<const f32>(r), eps}, at<f64>(dx_total), at<f64>(dx_squares));
}

void take(const Pixels& pixels, Address x, Address y, int threads) {
    nb::gil_scoped_release unlocked;
    take_pixels(pixels, at<const f32>(x), at<f32>(y), threads);
}

void spread(const Pixels& pixels, Address y, Address x, int threads) {
    nb::gil_scoped_release unlocked;
    spread_pixels(pixels, at<const f32>(y), at<f32>(x), threads);
}

void pool_forward(int path, const Windows& windows, Address x, Address y, Address taps, int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(max_pool, windows, at<const f32>(x), at<f32>(y), at<u8>(taps), threads);
}

void pool_backward(int path, const Windows& windows, Address g, Address taps, Address dx, int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(max_pool_grad, windows, at<const f32>(g), at<const u8>(taps), at<f32>(dx), threads);
}

}  // namespace

void bind_block(nb::module_& m) {
    m.def("normalize_batch", &normalize_batch);
    m.def("conv_normalize_batch", &conv_normalize_batch);
    m.def("normalize_grad_batch", &normalize_grad_batch, "path"_a, "backward"_a, nb::kw_only(), "eps"_a, "a"_a, "mean"_a,
          "invstd"_a, "q"_a, "r"_a, "grad_gamma"_a, "grad_beta"_a, "masked"_a, "dx_total"_a, "dx_squares"_a, "threads"_a);
    m.def("take_pixels", &take, "pixels"_a, nb::kw_only(), "x"_a, "y"_a, "threads"_a);
    m.def("spread_pixels", &spread, "pixels"_a, nb::kw_only(), "y"_a, "x"_a, "threads"_a);
    m.def("max_pool", &pool_forward, "path"_a, "windows"_a, nb::kw_only(), "x"_a, "y"_a, "taps"_a, "threads"_a);
    m.def("max_pool_grad", &pool_backward, "path"_a, "windows"_a, nb::kw_only(), "g"_a, "taps"_a, "dx"_a, "threads"_a);
}
