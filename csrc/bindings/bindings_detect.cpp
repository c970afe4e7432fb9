// SPDX-License-Identifier: Apache-2.0
// detect.h for Python (detection_ops.py), which has checked and laid out the tensors behind the addresses.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include <array>

#include "bindings/address.h"
#include "detect/detect.h"

namespace nb = nanobind;
using namespace byteback;

namespace {

void run_nms(s64 count, Address boxes, f64 threshold, Address kept) {
    nb::gil_scoped_release unlocked;
    nms(count, at<const f32>(boxes), threshold, at<u8>(kept));
}

using Run = void (*)(const RoiShape&, const f32*, const f32*, f32*, int);

template <Run run>
void run_roi_align(const std::array<s64, 8>& n, f64 scale, bool aligned, Address from, Address rois, Address to, int threads) {
    nb::gil_scoped_release unlocked;
    const RoiShape shape{n[0], n[1], n[2], n[3], n[4], n[5], n[6], static_cast<f32>(scale), n[7], aligned};
    run(shape, at<const f32>(from), at<const f32>(rois), at<f32>(to), threads);
}

}  // namespace

void bind_detect(nb::module_& m) {
    m.def("nms", &run_nms);
    m.def("roi_align", &run_roi_align<roi_align>);
    m.def("roi_align_grad", &run_roi_align<roi_align_grad>);
}
