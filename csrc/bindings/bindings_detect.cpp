// SPDX-License-Identifier: Apache-2.0
// detect.h for Python (ops/backends/cpu/detect.py), which checks the tensors and their layout.
#include <nanobind/nanobind.h>

#include "bindings/address.h"
#include "detect/detect.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace byteback;

namespace {

void run_nms(s64 count, Address boxes, f64 threshold, Address kept) {
    nb::gil_scoped_release unlocked;
    nms(count, at<const f32>(boxes), threshold, at<u8>(kept));
}

using Run = void (*)(const RoiShape&, const f32*, const f32*, f32*, int);

template <Run run>
void run_roi_align(const RoiShape& shape, Address source, Address rois, Address result, int threads) {
    nb::gil_scoped_release unlocked;
    run(shape, at<const f32>(source), at<const f32>(rois), at<f32>(result), threads);
}

template <Run run>
void bind_run(nb::module_& m, const char* name) {
    m.def(name, &run_roi_align<run>, "shape"_a, nb::kw_only(), "source"_a, "rois"_a, "result"_a, "threads"_a);
}

}  // namespace

void bind_detect(nb::module_& m) {
    m.def("nms", &run_nms, nb::kw_only(), "count"_a, "boxes"_a, "threshold"_a, "kept"_a);
    bind_run<roi_align>(m, "roi_align");
    bind_run<roi_align_grad>(m, "roi_align_grad");
}
