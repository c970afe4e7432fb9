// SPDX-License-Identifier: Apache-2.0
// The passes of norm.h for Python (ops/normalize_native.py). An address of 0 stands for a tensor that is not there.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>

#include <array>
#include <string>

#include "conv/conv.h"
#include "block/epilogue.h"
#include "block/norm.h"
#include "block/norm_coefficients.h"
#include "bindings/norm_numbers.h"
#include "bindings/shape_numbers.h"

namespace nb = nanobind;
using namespace byteback;

namespace {

void channel_stats(int path, s64 rows, s64 channels, Address x, Address total, Address squares, Address low, Address high,
                   int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(channel_stats, rows, channels, at<const f32>(x), at<f64>(total), at<f64>(squares), at<f32>(low),
                  at<f32>(high), threads);
}

void normalize_peak(int path, s64 rows, s64 channels, Address x, Address a, Address b, Address residual,
                    Address residual_scale, int activation, Address peak, int threads) {
    nb::gil_scoped_release unlocked;
    const Forward from = forward_of(rows, channels, x, a, b, residual, residual_scale, activation);
    *at<f32>(peak) = BYTEBACK_CALL(normalize_peak, from, threads);
}

void normalize(int path, s64 rows, s64 channels, Address x, Address a, Address b, Address residual,
               Address residual_scale, int activation, Address clip, Address values, Address scale, Address counts, Address output, Address mask, Address kept,
               int kind, Address step, Address centre, s64 pitch, int threads) {
    nb::gil_scoped_release unlocked;
    const f32 bound = clip ? *at<const f32>(clip) : 0.0f;
    const Outcome to{at<f32>(output), at<u8>(mask), at<s8>(values), bound, at<void>(kept), static_cast<Stored>(kind),
                     at<const f32>(step), at<const f32>(centre), pitch};
    const Forward from = forward_of(rows, channels, x, a, b, residual, residual_scale, activation);
    const Report seen = BYTEBACK_CALL(normalize, from, to, threads);
    if (!clip) return;
    write_scales(&bound, 1, at<f32>(scale));
    write_counts(seen, counts);
}

void normalize_grad_sums(int path, const BackwardNumbers& from, Address total, Address dot, Address squares, Address masked,
                         int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(normalize_grad_sums, backward_of(from), at<f64>(total), at<f64>(dot), at<f64>(squares), at<f32>(masked),
                  threads);
}

void normalize_grad(int path, const BackwardNumbers& from, Address dx, int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(normalize_grad, backward_of(from), at<f32>(dx), threads);
}

void normalize_grad_quantize(int path, const BackwardNumbers& from, Address clip, Address key, Address values, Address scale,
                             Address counts, Address peak, int threads) {
    nb::gil_scoped_release unlocked;
    const f32 bound = *at<const f32>(clip);
    const Report seen =
        BYTEBACK_CALL(normalize_grad_quantize, backward_of(from), bound, noise_of(key), at<s8>(values), threads);
    write_scales(&bound, 1, at<f32>(scale));
    write_counts(seen, counts);
    *at<f32>(peak) = seen.peak;
}

void pack_norm(int path, s64 rows, s64 channels, Address x, Address kept, int kind, Address step, Address centre,
               int threads) {
    nb::gil_scoped_release unlocked;
    const Outcome to{nullptr, nullptr, nullptr, 0.0f, at<void>(kept), static_cast<Stored>(kind), at<const f32>(step),
                     at<const f32>(centre), channels};
    BYTEBACK_CALL(pack_norm, rows, channels, at<const f32>(x), to, threads);
}

// The output of a convolution and `normalize` of it, which is never written. The kernel's name; empty where none can do that.
// Scales as in shape_numbers.h's GivenFactor.
std::string conv_normalize(int path, const ShapeNumbers& numbers, Address x, Address w, const std::array<Address, 2>& scales,
                           const std::array<s64, 2>& strides, const std::array<Address, 4>& vectors, int activation, Address clip,
                           Address values, Address scale, Address counts, Address output, s64 pitch, int threads) {
#ifdef BYTEBACK_AVX2
    nb::gil_scoped_release unlocked;
    struct Call {
        Path path;
        ConvShape shape;
        const s8 *x, *w;
        Factor factor;
        int threads;
        const char* kernel;
    };
    const GivenFactor factor(scales[0], scales[1], strides[0], strides[1]);
    Call call{static_cast<Path>(path), shape_of(numbers), at<const s8>(x), at<const s8>(w), factor.get(), threads, nullptr};
    if (call.path == Path::generic) return "";
    const s64 rows = call.shape.batch * call.shape.out_pixels(), channels = call.shape.out_channels;
    const f32 bound = clip ? *at<const f32>(clip) : 0.0f;
    const Forward from = forward_of(rows, channels, 0, vectors[0], vectors[1], vectors[2], vectors[3], activation);
    const Outcome to{at<f32>(output), nullptr, at<s8>(values), bound, nullptr, Stored::f32, nullptr, nullptr, pitch};
    const Report seen = avx2::with_epilogue(
        from, to, threads,
        [](const Epilogue& finish, void* context) {
            Call& c = *static_cast<Call*>(context);
            c.kernel = conv_finished(c.path, c.shape, c.x, c.w, c.factor, finish, c.threads);
        },
        &call);
    if (!call.kernel) return "";
    if (clip) {
        write_scales(&bound, 1, at<f32>(scale));
        write_counts(seen, counts);
    }
    return call.kernel;
#else
    (void)path, (void)numbers, (void)x, (void)w, (void)scales, (void)strides, (void)vectors, (void)activation, (void)clip;
    (void)values, (void)scale, (void)counts, (void)output, (void)pitch, (void)threads;
    return "";
#endif
}

// channels, count, total, squares, low, high, gamma, beta, bias, running mean, running variance
void coefficients(const std::array<Address, 11>& n, f64 eps, f64 momentum, bool floor, f32 ceiling,
                  const std::array<Address, 5>& to) {
    nb::gil_scoped_release unlocked;
    norm_coefficients({static_cast<s64>(n[0]), static_cast<s64>(n[1]), at<const f64>(n[2]), at<const f64>(n[3]),
                       at<const f32>(n[4]), at<const f32>(n[5]), at<const f32>(n[6]), at<const f32>(n[7]), at<const f32>(n[8]),
                       eps, momentum, at<f32>(n[9]), at<f32>(n[10]), ceiling, floor},
                      {at<f32>(to[0]), at<f32>(to[1]), at<f64>(to[2]), at<f64>(to[3]), at<f32>(to[4])});
}

// channels, mean, var, gamma, beta, bias
void folded(const std::array<Address, 6>& n, double eps, Address a, Address b) {
    nb::gil_scoped_release unlocked;
    norm_folded({static_cast<s64>(n[0]), at<const f32>(n[1]), at<const f32>(n[2]), at<const f32>(n[3]), at<const f32>(n[4]),
                 at<const f32>(n[5]), eps},
                at<f32>(a), at<f32>(b));
}

void invstd(s64 channels, Address var, double eps, Address to) {
    nb::gil_scoped_release unlocked;
    norm_invstd(channels, at<const f32>(var), eps, at<f64>(to));
}

// channels, count, a, mean, invstd, total, dot
void gradient(const std::array<Address, 7>& n, const std::array<Address, 4>& to) {
    nb::gil_scoped_release unlocked;
    norm_gradient({static_cast<s64>(n[0]), static_cast<s64>(n[1]), at<const f32>(n[2]), at<const f64>(n[3]),
                   at<const f64>(n[4]), at<const f64>(n[5]), at<const f64>(n[6])},
                  {at<f32>(to[0]), at<f32>(to[1]), at<f32>(to[2]), at<f32>(to[3])});
}

// channels, count, a, mean, invstd, total, dot, squares, q, r
void sums_of_gradient(const std::array<Address, 10>& n, f64 eps, Address total, Address squares) {
    nb::gil_scoped_release unlocked;
    const NormSums of{static_cast<s64>(n[0]), static_cast<s64>(n[1]), at<const f32>(n[2]), at<const f64>(n[3]),
                      at<const f64>(n[4]), at<const f64>(n[5]), at<const f64>(n[6])};
    gradient_sums({of, at<const f64>(n[7]), at<const f32>(n[8]), at<const f32>(n[9]), eps}, at<f64>(total), at<f64>(squares));
}

}  // namespace

void bind_norm(nb::module_& m) {
    m.def("channel_stats", &channel_stats);
    m.def("normalize_peak", &normalize_peak);
    m.def("normalize", &normalize);
    m.def("conv_normalize", &conv_normalize);
    m.def("normalize_grad_sums", &normalize_grad_sums);
    m.def("normalize_grad", &normalize_grad);
    m.def("normalize_grad_quantize", &normalize_grad_quantize);
    m.def("pack_norm", &pack_norm);
    m.def("norm_coefficients", &coefficients);
    m.def("norm_folded", &folded);
    m.def("norm_invstd", &invstd);
    m.def("norm_gradient", &gradient);
    m.def("gradient_sums", &sums_of_gradient);
}
