// SPDX-License-Identifier: Apache-2.0
// The passes of norm.h for a training step, one call for each direction of a block (ops/backends/cpu/block.py, block_grad.py):
// between two passes there is little arithmetic, and a return to Python would take longer. Also the pools. An address of 0
// means that there is no tensor.
#include <nanobind/nanobind.h>

#include <vector>

#include "bindings/normalize_batch.h"
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

void normalize_batch(int path, const ForwardPass& pass, const BatchGiven& given, const BatchMade& made, int threads) {
    nb::gil_scoped_release unlocked;
    OwnStatistics own(pass.channels);
    const Statistics s = own.places();
    BYTEBACK_CALL(channel_stats, pass.rows, pass.channels, at<const void>(given.x), pass.x, s.total, s.squares, s.low, s.high,
                  threads);
    normalize_counted(path, pass, s, given, made, threads);
}

// The same of a convolution's output, which is written to given.x. The kernel's name.
const char* conv_normalize_batch(int path, const ConvShape& shape, const ForwardPass& pass, const Operands& operands,
                                 const BatchGiven& given, const BatchMade& made, int threads) {
    nb::gil_scoped_release unlocked;
    return conv_and_normalize(path, shape, pass, operands, given, made, threads);
}

// dx_total and dx_squares: both or neither.
void normalize_grad_batch(int path, const Backward& from, f64 eps, Address a, Address mean, Address invstd, Address q,
                          Address r, Address grad_gamma, Address grad_beta, Address masked, Address dx_total,
                          Address dx_squares, int threads) {
    nb::gil_scoped_release unlocked;
    std::vector<f64> sums(3 * static_cast<size_t>(from.channels));
    f64 *total = sums.data(), *dot = total + from.channels, *squares = dx_total ? dot + from.channels : nullptr;
    BYTEBACK_CALL(normalize_grad_sums, from, total, dot, squares, at<void>(masked), threads);
    const NormSums seen{from.channels, from.rows, at<const f32>(a), at<const f64>(mean), at<const f64>(invstd), total, dot};
    norm_gradient(seen, {at<f32>(q), at<f32>(r), at<f32>(grad_gamma), at<f32>(grad_beta)});
    if (squares)
        gradient_sums({seen, squares, at<const f32>(q), at<const f32>(r), eps}, at<f64>(dx_total), at<f64>(dx_squares));
}

void add(int path, s64 rows, s64 channels, int g_kind, Address g, Address mask, Address x, Address dx, int threads) {
    nb::gil_scoped_release unlocked;
    const Waiting waiting{at<const void>(g), at<const u8>(mask), static_cast<Stored>(g_kind)};
    BYTEBACK_CALL(add_waiting, rows, channels, waiting, at<const f32>(x), at<f32>(dx), threads);
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
    m.def("add_waiting", &add, "path"_a, nb::kw_only(), "rows"_a, "channels"_a, "g_kind"_a, "g"_a, "mask"_a, "x"_a, "dx"_a,
          "threads"_a);
    m.def("take_pixels", &take, "pixels"_a, nb::kw_only(), "x"_a, "y"_a, "threads"_a);
    m.def("spread_pixels", &spread, "pixels"_a, nb::kw_only(), "y"_a, "x"_a, "threads"_a);
    m.def("max_pool", &pool_forward, "path"_a, "windows"_a, nb::kw_only(), "x"_a, "y"_a, "taps"_a, "threads"_a);
    m.def("max_pool_grad", &pool_backward, "path"_a, "windows"_a, nb::kw_only(), "g"_a, "taps"_a, "dx"_a, "threads"_a);
}
