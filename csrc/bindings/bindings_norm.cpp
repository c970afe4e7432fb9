// SPDX-License-Identifier: Apache-2.0
// The single passes of norm.h for Python (ops/backends/cpu/block.py, block_grad.py, norm.py), and the arithmetic per channel
// between them. An address of 0 means that there is no tensor.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings/bindings_pool.h"
#include "bindings/structs.h"
#include "block/epilogue.h"
#include "block/norm.h"
#include "block/norm_coefficients.h"
#include "conv/conv.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace byteback;

namespace {

void channel_stats(int path, s64 rows, s64 channels, Address x, int kind, Address total, Address squares, Address low,
                   Address high, int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(channel_stats, rows, channels, at<const void>(x), static_cast<Stored>(kind), at<f64>(total), at<f64>(squares),
                  at<f32>(low), at<f32>(high), threads);
}

void normalize_peak(int path, const ForwardPass& pass, Address x, Address a, Address b, Address residual,
                    Address residual_scale, Address peak, int threads) {
    nb::gil_scoped_release unlocked;
    const Forward from = forward_of(pass, x, a, b, residual, residual_scale);
    *at<f32>(peak) = BYTEBACK_CALL(normalize_peak, from, threads);
}

void normalize(int path, const ForwardPass& pass, Address x, Address a, Address b, Address residual, Address residual_scale,
               Address clip, Address values, Address scale, Address counts, Address output, Address mask, Address kept,
               Address step, Address centre, int threads) {
    nb::gil_scoped_release unlocked;
    const f32 bound = clip ? *at<const f32>(clip) : 0.0f;
    const Outcome to{at<void>(output), at<u8>(mask),        at<s8>(values),        bound,      at<void>(kept),
                     pass.kept,        at<const f32>(step), at<const f32>(centre), pass.pitch, pass.output};
    const Forward from = forward_of(pass, x, a, b, residual, residual_scale);
    const Report seen = BYTEBACK_CALL(normalize, from, to, threads);
    if (!clip) return;
    write_scales(&bound, 1, at<f32>(scale));
    write_counts(seen, counts);
}

void pack_norm(int path, const ForwardPass& pass, Address x, Address kept, Address step, Address centre, int threads) {
    nb::gil_scoped_release unlocked;
    const Outcome to{
        nullptr, nullptr, nullptr, 0.0f, at<void>(kept), pass.kept, at<const f32>(step), at<const f32>(centre), pass.channels};
    BYTEBACK_CALL(pack_norm, pass.rows, pass.channels, at<const void>(x), pass.x, to, threads);
}

void normalize_grad_sums(int path, const Backward& from, Address total, Address dot, Address squares, Address masked,
                         int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(normalize_grad_sums, from, at<f64>(total), at<f64>(dot), at<f64>(squares), at<void>(masked), threads);
}

void normalize_grad(int path, const Backward& from, Address dx, int threads) {
    nb::gil_scoped_release unlocked;
    BYTEBACK_CALL(normalize_grad, from, at<f32>(dx), threads);
}

void normalize_grad_quantize(int path, const Backward& from, Address clip, Address key, Address values, Address scale,
                             Address counts, Address peak, int threads) {
    nb::gil_scoped_release unlocked;
    const f32 bound = *at<const f32>(clip);
    const Report seen = BYTEBACK_CALL(normalize_grad_quantize, from, bound, noise_of(key), at<s8>(values), threads);
    write_scales(&bound, 1, at<f32>(scale));
    write_counts(seen, counts);
    *at<f32>(peak) = seen.peak;
}

// The output of a convolution and `normalize` of it, which is never written. The kernel's name; empty where none can do that.
const char* conv_and_finish(int path, const ConvShape& shape, const ForwardPass& pass, const Operands& operands, Address a,
                            Address b, Address residual, Address residual_scale, Address clip, Address values, Address scale,
                            Address counts, Address output, int threads) {
#ifdef BYTEBACK_AVX2
    struct Call {
        Path path;
        const ConvShape& shape;
        const s8 *x, *w;
        Factor factor;
        int threads;
        const char* kernel;
    };
    const GivenFactor factor(operands);
    Call call{
        static_cast<Path>(path), shape, at<const s8>(operands.a), at<const s8>(operands.b), factor.get(), threads, nullptr};
    if (call.path == Path::generic) return "";
    const f32 bound = clip ? *at<const f32>(clip) : 0.0f;
    const Forward from = forward_of(pass, 0, a, b, residual, residual_scale);
    const Outcome to{at<f32>(output), nullptr, at<s8>(values), bound, nullptr, Stored::f32, nullptr, nullptr, pass.pitch};
    const Report seen = avx2::with_epilogue(
        from, to, threads,
        [](const Epilogue& finish, void* context) {
            Call& c = *static_cast<Call*>(context);
            c.kernel = conv_with_epilogue(c.path, c.shape, c.x, c.w, c.factor, finish, c.threads);
        },
        &call);
    if (!call.kernel) return "";
    if (clip) {
        write_scales(&bound, 1, at<f32>(scale));
        write_counts(seen, counts);
    }
    return call.kernel;
#else
    (void)path, (void)shape, (void)pass, (void)operands, (void)a, (void)b, (void)residual, (void)residual_scale, (void)clip;
    (void)values, (void)scale, (void)counts, (void)output, (void)threads;
    return "";
#endif
}

std::string conv_normalize(int path, const ConvShape& shape, const ForwardPass& pass, const Operands& operands, Address a,
                           Address b, Address residual, Address residual_scale, Address clip, Address values, Address scale,
                           Address counts, Address output, int threads) {
    nb::gil_scoped_release unlocked;
    return conv_and_finish(path, shape, pass, operands, a, b, residual, residual_scale, clip, values, scale, counts, output,
                           threads);
}

// A block: what is the same in all its predictions of one shape.
struct PredictPlan {
    ConvShape conv;
    ForwardPass pass;
    Layout output, one;  // one: of a single scale
};

void make_predict_plan(PredictPlan* made, const ConvShape& conv, const ForwardPass& forward, nb::handle output) {
    const Layout layout = layout_of(output[0], output[1]);
    Layout one{layout.axes, {}, {}};
    for (int i = 0; i < one.axes; ++i) one.shape[i] = one.strides[i] = 1;
    new (made) PredictPlan{conv, forward, layout, one};
}

// conv_normalize of it. The results: the kernel's name, and values, scale, counts and output as capsules; None for what is not
// asked for, and instead of all where no kernel can do that.
nb::object predict_block(int path, const PredictPlan& plan, Address x, Address x_scale, Address weight, Address weight_scale,
                         Address a, Address b, Address residual, Address residual_scale, Address clip, bool floats, s64 limit,
                         int threads) {
    static const Layout two{1, {2}, {1}};
    Lent values{nb::none(), nullptr}, scale{nb::none(), nullptr}, counts{nb::none(), nullptr}, output{nb::none(), nullptr};
    if (clip) {
        values = lend_tensor(plan.output, kInt8, limit);
        scale = lend_tensor(plan.one, kFloat32, limit), counts = lend_tensor(two, kInt64, limit);
    }
    if (floats) output = lend_tensor(plan.output, kFloat32, limit);
    const auto address = [](const Lent& lent) { return reinterpret_cast<Address>(lent.memory); };
    const char* kernel;
    {
        nb::gil_scoped_release unlocked;
        const Operands operands{x, weight, x_scale, weight_scale, 0, 0};
        kernel = conv_and_finish(path, plan.conv, plan.pass, operands, a, b, residual, residual_scale, clip, address(values),
                                 address(scale), address(counts), address(output), threads);
    }
    if (!*kernel) return nb::none();
    return nb::make_tuple(kernel, values.capsule, scale.capsule, counts.capsule, output.capsule);
}

void coefficients(s64 channels, s64 count, f64 eps, f64 momentum, bool floor, f32 ceiling, Address total, Address squares,
                  Address low, Address high, Address gamma, Address beta, Address bias, Address running_mean,
                  Address running_var, Address a, Address b, Address mean, Address invstd, Address peak) {
    nb::gil_scoped_release unlocked;
    norm_coefficients({channels, count, at<const f64>(total), at<const f64>(squares), at<const f32>(low), at<const f32>(high),
                       at<const f32>(gamma), at<const f32>(beta), at<const f32>(bias), eps, momentum, at<f32>(running_mean),
                       at<f32>(running_var), ceiling, floor},
                      {at<f32>(a), at<f32>(b), at<f64>(mean), at<f64>(invstd), at<f32>(peak)});
}

void folded(s64 channels, f64 eps, Address mean, Address var, Address gamma, Address beta, Address bias, Address a, Address b) {
    nb::gil_scoped_release unlocked;
    norm_folded({channels, at<const f32>(mean), at<const f32>(var), at<const f32>(gamma), at<const f32>(beta),
                 at<const f32>(bias), eps},
                at<f32>(a), at<f32>(b));
}

void invstd_of(s64 channels, f64 eps, Address var, Address invstd) {
    nb::gil_scoped_release unlocked;
    norm_invstd(channels, at<const f32>(var), eps, at<f64>(invstd));
}

void gradient(s64 channels, s64 count, Address a, Address mean, Address invstd, Address total, Address dot, Address q,
              Address r, Address grad_gamma, Address grad_beta) {
    nb::gil_scoped_release unlocked;
    norm_gradient({channels, count, at<const f32>(a), at<const f64>(mean), at<const f64>(invstd), at<const f64>(total),
                   at<const f64>(dot)},
                  {at<f32>(q), at<f32>(r), at<f32>(grad_gamma), at<f32>(grad_beta)});
}

// From the sums of g (total, dot, squares) to those of dx.
void sums_of_gradient(s64 channels, s64 count, f64 eps, Address a, Address q, Address r, Address mean, Address invstd,
                      Address total, Address dot, Address squares, Address dx_total, Address dx_squares) {
    nb::gil_scoped_release unlocked;
    const NormSums of{
        channels,          count, at<const f32>(a), at<const f64>(mean), at<const f64>(invstd), at<const f64>(total),
        at<const f64>(dot)};
    gradient_sums({of, at<const f64>(squares), at<const f32>(q), at<const f32>(r), eps}, at<f64>(dx_total),
                  at<f64>(dx_squares));
}

void bind_arithmetic(nb::module_& m) {
    m.def("norm_coefficients", &coefficients, nb::kw_only(), "channels"_a, "count"_a, "eps"_a, "momentum"_a, "floor"_a,
          "ceiling"_a, "total"_a, "squares"_a, "low"_a, "high"_a, "gamma"_a, "beta"_a, "bias"_a, "running_mean"_a,
          "running_var"_a, "a"_a, "b"_a, "mean"_a, "invstd"_a, "peak"_a);
    m.def("norm_folded", &folded, nb::kw_only(), "channels"_a, "eps"_a, "mean"_a, "var"_a, "gamma"_a, "beta"_a, "bias"_a, "a"_a,
          "b"_a);
    m.def("norm_invstd", &invstd_of, nb::kw_only(), "channels"_a, "eps"_a, "var"_a, "invstd"_a);
    m.def("norm_gradient", &gradient, nb::kw_only(), "channels"_a, "count"_a, "a"_a, "mean"_a, "invstd"_a, "total"_a, "dot"_a,
          "q"_a, "r"_a, "grad_gamma"_a, "grad_beta"_a);
    m.def("gradient_sums", &sums_of_gradient, nb::kw_only(), "channels"_a, "count"_a, "eps"_a, "a"_a, "q"_a, "r"_a, "mean"_a,
          "invstd"_a, "total"_a, "dot"_a, "squares"_a, "dx_total"_a, "dx_squares"_a);
}

}  // namespace

void bind_norm(nb::module_& m) {
    m.def("channel_stats", &channel_stats, "path"_a, nb::kw_only(), "rows"_a, "channels"_a, "x"_a, "kind"_a = 0, "total"_a,
          "squares"_a, "low"_a, "high"_a, "threads"_a);
    m.def("normalize_peak", &normalize_peak, "path"_a, "forward"_a, nb::kw_only(), "x"_a, "a"_a, "b"_a, "residual"_a,
          "residual_scale"_a, "peak"_a, "threads"_a);
    m.def("normalize", &normalize, "path"_a, "forward"_a, nb::kw_only(), "x"_a, "a"_a, "b"_a, "residual"_a, "residual_scale"_a,
          "clip"_a, "values"_a, "scale"_a, "counts"_a, "output"_a, "mask"_a, "kept"_a, "step"_a, "centre"_a, "threads"_a);
    m.def("pack_norm", &pack_norm, "path"_a, "forward"_a, nb::kw_only(), "x"_a, "kept"_a, "step"_a, "centre"_a, "threads"_a);
    m.def("conv_normalize", &conv_normalize, "path"_a, "shape"_a, "forward"_a, "operands"_a, nb::kw_only(), "a"_a, "b"_a,
          "residual"_a, "residual_scale"_a, "clip"_a, "values"_a, "scale"_a, "counts"_a, "output"_a, "threads"_a);
    nb::class_<PredictPlan>(m, "PredictPlan")
        .def("__init__", &make_predict_plan, nb::kw_only(), "conv"_a, "forward"_a, "output"_a);
    m.def("predict_block", &predict_block);
    m.def("normalize_grad_sums", &normalize_grad_sums, "path"_a, "backward"_a, nb::kw_only(), "total"_a, "dot"_a, "squares"_a,
          "masked"_a, "threads"_a);
    m.def("normalize_grad", &normalize_grad, "path"_a, "backward"_a, nb::kw_only(), "dx"_a, "threads"_a);
    m.def("normalize_grad_quantize", &normalize_grad_quantize, "path"_a, "backward"_a, nb::kw_only(), "clip"_a, "key"_a,
          "values"_a, "scale"_a, "counts"_a, "peak"_a, "threads"_a);
    bind_arithmetic(m);
}
