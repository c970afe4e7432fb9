// SPDX-License-Identifier: Apache-2.0
// The passes of norm.h as a training step takes them, one call for each direction of a block (ops/batch.py): between two passes
// there is little arithmetic, and the way through Python would take longer. An address of 0 stands for a tensor that is not there.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include <array>
#include <vector>

#include "conv/conv.h"
#include "block/max_pool.h"
#include "block/norm.h"
#include "block/norm_coefficients.h"
#include "bindings/norm_numbers.h"
#include "block/pixels.h"
#include "bindings/shape_numbers.h"

namespace nb = nanobind;
using namespace byteback;

namespace {

// rows, channels, x, gamma, beta, bias, running mean, running variance, residual, its scale
using BatchFrom = std::array<Address, 10>;
// a, b, mean, invstd, peak, values, scale, counts, output, mask, x as it is kept, its step, its centre
using BatchTo = std::array<Address, 13>;

struct BatchNumbers {
    f64 eps, momentum;
    int activation;
    bool floor;          // the activation cuts at 0,
    f32 ceiling;         // and here
    bool peak_is_known;  // the extremes of a channel tell the largest value of the result, no reading is needed
    int kept;
};

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
void normalize_counted(int path, const Statistics& seen_of, const BatchFrom& from, const BatchNumbers& n, const BatchTo& to,
                       int threads) {
    const s64 rows = static_cast<s64>(from[0]), channels = static_cast<s64>(from[1]);
    const auto& [total, squares, low, high] = seen_of;
    f32* peak = at<f32>(to[4]);
    norm_coefficients({channels, rows, total, squares, low, high, at<const f32>(from[3]), at<const f32>(from[4]),
                       at<const f32>(from[5]), n.eps, n.momentum, at<f32>(from[6]), at<f32>(from[7]), n.ceiling, n.floor},
                      {at<f32>(to[0]), at<f32>(to[1]), at<f64>(to[2]), at<f64>(to[3]), peak});
    const Forward pass = forward_of(rows, channels, from[2], to[0], to[1], from[8], from[9], n.activation);
    if (to[5] && !n.peak_is_known) *peak = BYTEBACK_CALL(normalize_peak, pass, threads);
    if (!to[5] && !to[8] && !to[9] && !to[10]) return;
    if (to[11]) norm_steps(channels, low, high, at<const f64>(to[2]), at<f32>(to[11]), at<f32>(to[12]));
    const Outcome outcome{at<f32>(to[8]), at<u8>(to[9]), at<s8>(to[5]), to[5] ? *peak : 0.0f, at<void>(to[10]),
                          static_cast<Stored>(n.kept), at<const f32>(to[11]), at<const f32>(to[12]), channels};
    const Report seen = BYTEBACK_CALL(normalize, pass, outcome, threads);
    if (!to[5]) return;
    write_scales(peak, 1, at<f32>(to[6]));
    write_counts(seen, to[7]);
}

void normalize_batch(int path, const BatchFrom& from, f64 eps, f64 momentum, int activation, bool floor, f32 ceiling,
                     bool peak_is_known, int kept, const BatchTo& to, int threads) {
    nb::gil_scoped_release unlocked;
    OwnStatistics own(static_cast<s64>(from[1]));
    const Statistics s = own.places();
    BYTEBACK_CALL(channel_stats, static_cast<s64>(from[0]), static_cast<s64>(from[1]), at<const f32>(from[2]), s.total, s.squares,
                  s.low, s.high, threads);
    normalize_counted(path, s, from, {eps, momentum, activation, floor, ceiling, peak_is_known, kept}, to, threads);
}

// The same of a convolution's output, which is written to from[2] and counted on the way where a kernel can. The kernel's name.
// Scales as in shape_numbers.h's GivenFactor.
const char* conv_normalize_batch(int path, const ShapeNumbers& numbers, Address x, Address w, const std::array<Address, 2>& scales,
                                 const std::array<s64, 2>& strides, const BatchFrom& from, f64 eps, f64 momentum, int activation,
                                 bool floor, f32 ceiling, bool peak_is_known, int kept, const BatchTo& to, int threads) {
    nb::gil_scoped_release unlocked;
    const ConvShape shape = shape_of(numbers);
    const GivenFactor factor(scales[0], scales[1], strides[0], strides[1]);
    OwnStatistics own(shape.out_channels);
    const Statistics s = own.places();
    f32* y = at<f32>(from[2]);
    const Path chosen = static_cast<Path>(path);
    const char* kernel = conv_counted(chosen, shape, at<const s8>(x), at<const s8>(w), factor.get(), y, s, threads);
    if (!kernel) {
        kernel = conv_output(chosen, shape, at<const s8>(x), at<const s8>(w), factor.get(), y, threads);
        BYTEBACK_CALL(channel_stats, shape.batch * shape.out_pixels(), shape.out_channels, y, s.total, s.squares, s.low, s.high,
                      threads);
    }
    normalize_counted(path, s, from, {eps, momentum, activation, floor, ceiling, peak_is_known, kept}, to, threads);
    return kernel;
}

// norm: a, mean, invstd; to: q, r, grad_gamma, grad_beta, the masked gradient, the sum of dx and of dx² (both or neither)
void normalize_grad_batch(int path, const BackwardNumbers& numbers, const std::array<Address, 3>& norm, f64 eps,
                          const std::array<Address, 7>& to, int threads) {
    nb::gil_scoped_release unlocked;
    const Backward from = backward_of(numbers);
    std::vector<f64> sums(3 * static_cast<size_t>(from.channels));
    f64 *total = sums.data(), *dot = total + from.channels, *squares = to[5] ? dot + from.channels : nullptr;
    BYTEBACK_CALL(normalize_grad_sums, from, total, dot, squares, at<f32>(to[4]), threads);
    const NormSums seen{from.channels, from.rows, at<const f32>(norm[0]), at<const f64>(norm[1]), at<const f64>(norm[2]),
                        total, dot};
    norm_gradient(seen, {at<f32>(to[0]), at<f32>(to[1]), at<f32>(to[2]), at<f32>(to[3])});
    if (squares)
        gradient_sums({seen, squares, at<const f32>(to[0]), at<const f32>(to[1]), eps}, at<f64>(to[5]), at<f64>(to[6]));
}

Pixels pixels_of(const std::array<s64, 8>& n) { return {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7]}; }

void take(const std::array<s64, 8>& numbers, Address x, Address y, int threads) {
    nb::gil_scoped_release unlocked;
    take_pixels(pixels_of(numbers), at<const f32>(x), at<f32>(y), threads);
}

void spread(const std::array<s64, 8>& numbers, Address y, Address x, int threads) {
    nb::gil_scoped_release unlocked;
    spread_pixels(pixels_of(numbers), at<const f32>(y), at<f32>(x), threads);
}

using WindowNumbers = std::array<s64, 14>;

Windows windows_of(const WindowNumbers& n) {
    return {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13]};
}

void pool_forward(int path, const WindowNumbers& numbers, Address x, Address y, Address taps, int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(max_pool, windows_of(numbers), at<const f32>(x), at<f32>(y), at<u8>(taps), threads);
}

void pool_backward(int path, const WindowNumbers& numbers, Address g, Address taps, Address dx, int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(max_pool_grad, windows_of(numbers), at<const f32>(g), at<const u8>(taps), at<f32>(dx), threads);
}

}  // namespace

void bind_block(nb::module_& m) {
    m.def("normalize_batch", &normalize_batch);
    m.def("conv_normalize_batch", &conv_normalize_batch);
    m.def("normalize_grad_batch", &normalize_grad_batch);
    m.def("take_pixels", &take);
    m.def("spread_pixels", &spread);
    m.def("max_pool", &pool_forward);
    m.def("max_pool_grad", &pool_backward);
}
