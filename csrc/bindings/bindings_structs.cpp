// SPDX-License-Identifier: Apache-2.0
// The structs of structs.h and of the kernels as Python classes, which are created from named fields.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include <algorithm>
#include <array>

#include "bindings/structs.h"
#include "block/max_pool.h"
#include "block/pixels.h"
#include "detect/detect.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace byteback;

namespace {

using Three = std::array<s64, 3>;  // depth, height, width
using Two = std::array<s64, 2>;    // height, width

void make_shape(ConvShape* made, s64 batch, s64 in_channels, s64 out_channels, s64 groups, const Three& input,
                const Three& kernel, const Three& output, const Three& stride, const Three& padding, const Three& dilation) {
    new (made) ConvShape{batch, in_channels, out_channels, groups, {}, {}, {}, {}, {}, {}};
    const auto set = [](const Three& from, s64(&to)[3]) { std::copy(from.begin(), from.end(), to); };
    set(input, made->in), set(kernel, made->kernel), set(output, made->out);
    set(stride, made->stride), set(padding, made->padding), set(dilation, made->dilation);
}

void make_forward(ForwardPass* made, s64 rows, s64 channels, int activation, bool floor, f32 ceiling, bool peak_is_known,
                  int kept, s64 pitch, int x, int residual, int output) {
    new (made) ForwardPass{rows,
                           channels,
                           static_cast<Activation>(activation),
                           floor,
                           ceiling,
                           peak_is_known,
                           static_cast<Stored>(kept),
                           pitch,
                           static_cast<Stored>(x),
                           static_cast<Stored>(residual),
                           static_cast<Stored>(output)};
}

// kept says how x is stored, with its step and centre for int8; g_kind says how g is; of a, b and mask what the gate needs, of
// p, q, r all or none.
void make_backward(Backward* made, s64 rows, s64 channels, int gate, int kept, int g_kind, Address g, Address x, Address step,
                   Address centre, Address a, Address b, Address mask, Address p, Address q, Address r) {
    const Kept stored{at<const void>(x), static_cast<Stored>(kept), at<const f32>(step), at<const f32>(centre)};
    new (made) Backward{rows,
                        channels,
                        at<const void>(g),
                        stored,
                        at<const f32>(a),
                        at<const f32>(b),
                        at<const u8>(mask),
                        static_cast<Gate>(gate),
                        at<const f32>(p),
                        at<const f32>(q),
                        at<const f32>(r),
                        static_cast<Stored>(g_kind)};
}

void make_windows(Windows* made, s64 batch, s64 channels, const Two& size, const Two& kernel, const Two& stride,
                  const Two& padding, const Two& dilation, const Two& count) {
    new (made) Windows{batch,     size[0],    size[1],    channels,    kernel[0],   kernel[1], stride[0],
                       stride[1], padding[0], padding[1], dilation[0], dilation[1], count[0],  count[1]};
}

void make_pixels(Pixels* made, s64 batch, s64 channels, const Two& size, const Two& stride, const Two& count) {
    new (made) Pixels{batch, size[0], size[1], channels, stride[0], stride[1], count[0], count[1]};
}

void make_roi_shape(RoiShape* made, s64 batch, s64 channels, const Two& size, s64 rois, const Two& bins, f64 scale, s64 samples,
                    bool aligned) {
    new (made) RoiShape{batch, size[0], size[1], channels, rois, bins[0], bins[1], static_cast<f32>(scale), samples, aligned};
}

}  // namespace

void bind_structs(nb::module_& m) {
    nb::class_<ConvShape>(m, "ConvShape")
        .def("__init__", &make_shape, nb::kw_only(), "batch"_a, "in_channels"_a, "out_channels"_a, "groups"_a, "input"_a,
             "kernel"_a, "output"_a, "stride"_a, "padding"_a, "dilation"_a);
    nb::class_<Rows>(m, "Rows").def(
        "__init__",
        [](Rows* made, s64 outer, s64 inner, s64 channels, s64 outer_stride, s64 inner_stride, s64 channel_stride) {
            new (made) Rows{outer, inner, channels, outer_stride, inner_stride, channel_stride};
        },
        nb::kw_only(), "outer"_a, "inner"_a, "channels"_a, "outer_stride"_a, "inner_stride"_a, "channel_stride"_a);
    nb::class_<Operands>(m, "Operands")
        .def(
            "__init__",
            [](Operands* made, Address a, Address b, Address a_scale, Address b_scale, s64 row, s64 column) {
                new (made) Operands{a, b, a_scale, b_scale, row, column};
            },
            nb::kw_only(), "a"_a, "b"_a, "a_scale"_a, "b_scale"_a = 0, "row"_a = 0, "column"_a = 0);
    nb::class_<ForwardPass>(m, "ForwardPass")
        .def("__init__", &make_forward, nb::kw_only(), "rows"_a, "channels"_a, "activation"_a, "floor"_a, "ceiling"_a,
             "peak_is_known"_a, "kept"_a, "pitch"_a, "x"_a = 0, "residual"_a = 0, "output"_a = 0);
    nb::class_<BatchGiven>(m, "BatchGiven")
        .def(
            "__init__",
            [](BatchGiven* made, Address x, Address gamma, Address beta, Address bias, Address running_mean,
               Address running_var, Address residual, Address residual_scale, f64 eps, f64 momentum) {
                new (made) BatchGiven{x, gamma, beta, bias, running_mean, running_var, residual, residual_scale, eps, momentum};
            },
            nb::kw_only(), "x"_a, "gamma"_a, "beta"_a, "bias"_a, "running_mean"_a, "running_var"_a, "residual"_a,
            "residual_scale"_a, "eps"_a, "momentum"_a);
    nb::class_<BatchMade>(m, "BatchMade")
        .def(
            "__init__",
            [](BatchMade* made, Address a, Address b, Address mean, Address invstd, Address peak, Address values, Address scale,
               Address counts, Address output, Address mask, Address kept, Address step, Address centre) {
                new (made) BatchMade{a, b, mean, invstd, peak, values, scale, counts, output, mask, kept, step, centre};
            },
            nb::kw_only(), "a"_a, "b"_a, "mean"_a, "invstd"_a, "peak"_a, "values"_a, "scale"_a, "counts"_a, "output"_a,
            "mask"_a, "kept"_a, "step"_a, "centre"_a);
    nb::class_<Backward>(m, "Backward")
        .def("__init__", &make_backward, nb::kw_only(), "rows"_a, "channels"_a, "gate"_a, "kept"_a, "g_kind"_a, "g"_a, "x"_a,
             "step"_a, "centre"_a, "a"_a, "b"_a, "mask"_a, "p"_a, "q"_a, "r"_a);
    nb::class_<Windows>(m, "Windows")
        .def("__init__", &make_windows, nb::kw_only(), "batch"_a, "channels"_a, "size"_a, "kernel"_a, "stride"_a, "padding"_a,
             "dilation"_a, "count"_a);
    nb::class_<Pixels>(m, "Pixels")
        .def("__init__", &make_pixels, nb::kw_only(), "batch"_a, "channels"_a, "size"_a, "stride"_a, "count"_a);
    nb::class_<RoiShape>(m, "RoiShape")
        .def("__init__", &make_roi_shape, nb::kw_only(), "batch"_a, "channels"_a, "size"_a, "rois"_a, "bins"_a, "scale"_a,
             "samples"_a, "aligned"_a);
}
