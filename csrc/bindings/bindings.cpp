// SPDX-License-Identifier: Apache-2.0
// The native module. Only the files bindings_*.cpp use Python. Tensors are passed as raw addresses, by name and checked on the
// Python side (ops/backends/cpu/addresses.py), shapes as structs (structs.h). The GIL is released while a kernel runs. This
// file binds the paths, the peaks of the machine and the products.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/structs.h"
#include "conv/conv.h"
#include "conv/plan.h"
#include "block/pass_check.h"
#include "conv/self_check.h"
#include "core/peak.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace byteback;

void bind_structs(nb::module_&);   // bindings_structs.cpp
void bind_quantize(nb::module_&);  // bindings_quantize.cpp
void bind_norm(nb::module_&);      // bindings_norm.cpp
void bind_block(nb::module_&);     // bindings_block.cpp
void bind_pairs(nb::module_&);     // bindings_pairs.cpp
void bind_step(nb::module_&);      // bindings_step.cpp
void bind_detect(nb::module_&);    // bindings_detect.cpp
void bind_pool(nb::module_&);      // bindings_pool.cpp

namespace {

using Product = const char* (*)(Path, const ConvShape&, const s8*, const s8*, Factor, f32*, int);

// Returns the name of the kernel. The operands are not one struct here: these are the calls that small layers wait for.
template <Product product>
const char* run_product(int path, const ConvShape& shape, Address a, Address b, Address a_scale, Address b_scale, s64 row,
                        s64 column, Address result, int threads) {
    nb::gil_scoped_release unlocked;
    const GivenFactor factor({a, b, a_scale, b_scale, row, column});
    return product(static_cast<Path>(path), shape, at<const s8>(a), at<const s8>(b), factor.get(), at<f32>(result), threads);
}

template <Product product>
void bind_product(nb::module_& m, const char* name) {
    m.def(name, &run_product<product>, "path"_a, "shape"_a, nb::kw_only(), "a"_a, "b"_a, "a_scale"_a, "b_scale"_a, "row"_a = 0,
          "column"_a = 0, "result"_a, "threads"_a);
}

std::tuple<std::string, std::string> explain(int path, int kind, const ConvShape& shape) {
    const Plan plan = make_plan(shape, static_cast<ProductKind>(kind), static_cast<Path>(path));
    return {name_of(plan.algorithm), plan.reason};
}

nb::dict peaks(int threads) {
    std::vector<Peak> measured;
    {
        nb::gil_scoped_release unlocked;
        measured = measure_peaks(threads);
    }
    nb::dict gmacs;
    for (const Peak& peak : measured) gmacs[peak.instruction] = peak.gmacs;
    return gmacs;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native kernels of Byteback; used through byteback.ops.";
    nb::set_leak_warnings(false);  // structs that Python remembers for a shape live as long as the process
    m.def("is_compiled", [](int path) { return is_compiled(static_cast<Path>(path)); });
    m.def("cpu_supports", [](int path) { return cpu_supports(static_cast<Path>(path)); });
    m.def("self_check", [](int path) {
        const std::string found = self_check(static_cast<Path>(path));
        return found.empty() ? pass_check(static_cast<Path>(path)) : found;
    });
    m.def("peaks", &peaks, "threads"_a);
    bind_structs(m);
    bind_product<conv_output>(m, "conv_output");
    bind_product<conv_grad_input>(m, "conv_grad_input");
    bind_product<conv_grad_weight>(m, "conv_grad_weight");
    m.def("explain", &explain);
    bind_quantize(m);
    bind_norm(m);
    bind_block(m);
    bind_pairs(m);
    bind_step(m);
    bind_detect(m);
    bind_pool(m);
}
