// SPDX-License-Identifier: Apache-2.0
// The pool for Python (ops/backends/cpu/allocator.py). A block is returned as a DLPack capsule, the only way to create a tensor
// with sizes and strides that needs neither PyTorch's headers nor its dispatcher. When the storage of the tensor is freed, in
// any thread, the block returns to the pool.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <limits>
#include <new>
#include <stdexcept>
#include <tuple>

#include "bindings/bindings_pool.h"

namespace nb = nanobind;
using namespace byteback;

namespace {

// The structures of DLPack before its version 1, as every consumer knows them.
struct DlDevice {
    int32_t type, id;
};
struct DlType {
    u8 code, bits;
    u16 lanes;
};
struct DlTensor {
    void* data;
    DlDevice device;
    int32_t axes;
    DlType type;
    s64* shape;
    s64* strides;  // in elements
    u64 byte_offset;
};
struct DlManagedTensor {
    DlTensor tensor;
    void* context;
    void (*deleter)(DlManagedTensor*);
};

constexpr int32_t kCpu = 1;

struct Loan {
    DlManagedTensor managed;
    Block block;
    Layout layout;
};

void end_loan(DlManagedTensor* managed) {
    Loan* loan = static_cast<Loan*>(managed->context);
    pool_give_back(loan->block);
    delete loan;
}

// Of a capsule that nobody made a tensor of; else it has another name.
void drop_capsule(PyObject* capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor"))
        end_loan(static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor")));
}

// Sizes or strides, a tuple or a list, into `to`; returns how many.
Py_ssize_t read_numbers(nb::handle numbers, s64* to) {
    const nb::object fast = nb::steal(PySequence_Fast(numbers.ptr(), "lend: sizes and strides are sequences of integers"));
    if (!fast.is_valid()) throw nb::python_error();
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast.ptr());
    if (count > kMostAxes) throw std::invalid_argument("lend: a tensor of more than 8 axes");
    for (Py_ssize_t i = 0; i < count; ++i) {
        to[i] = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast.ptr(), i));
        if (to[i] == -1 && PyErr_Occurred()) throw nb::python_error();
    }
    return count;
}

// What a dense tensor of these sizes takes. A product that wraps around would be a block shorter than what is written to it.
s64 bytes_of(const s64* shape, Py_ssize_t axes, s64 bytes) {
    for (Py_ssize_t i = 0; i < axes; ++i) {
        if (shape[i] < 0) throw std::invalid_argument("lend: a size is negative");
        if (shape[i] && bytes > std::numeric_limits<s64>::max() / shape[i]) throw std::bad_alloc();
        bytes *= shape[i];
    }
    return bytes;
}

// Refuses strides that lead out of a block of so many elements.
void check_strides(const s64* shape, const s64* strides, Py_ssize_t axes, s64 elements) {
    s64 left = elements - 1;  // elements behind the last one that can be reached so far
    for (Py_ssize_t i = 0; i < axes && elements; ++i) {
        if (shape[i] == 1) continue;
        if (strides[i] < 0 || (strides[i] && shape[i] - 1 > left / strides[i]))
            throw std::invalid_argument("lend: the strides lead out of a dense tensor of these sizes");
        left -= (shape[i] - 1) * strides[i];
    }
}

}  // namespace

Layout layout_of(nb::handle shape, nb::handle strides) {
    Layout made;
    const Py_ssize_t axes = read_numbers(shape, made.shape);
    if (read_numbers(strides, made.strides) != axes) throw std::invalid_argument("lend: as many strides as sizes, please");
    check_strides(made.shape, made.strides, axes, bytes_of(made.shape, axes, 1));
    made.axes = static_cast<int>(axes);
    return made;
}

Lent lend_tensor(const Layout& layout, ElementType type, s64 limit, Stay stay) {
    Loan* loan = new Loan;
    try {
        loan->layout = layout;
        const s64 bytes = bytes_of(layout.shape, layout.axes, type.bits / 8);
        loan->block = pool_lend(static_cast<size_t>(bytes), static_cast<size_t>(limit), stay);
        const DlType element{type.code, type.bits, 1};
        const DlTensor tensor{loan->block.memory, {kCpu, 0}, layout.axes, element, loan->layout.shape, loan->layout.strides, 0};
        loan->managed = {tensor, loan, end_loan};
    } catch (...) {
        delete loan;
        throw;
    }
    PyObject* capsule = PyCapsule_New(&loan->managed, "dltensor", drop_capsule);
    if (!capsule) {
        end_loan(&loan->managed);
        throw nb::python_error();
    }
    return {nb::steal(capsule), loan->block.memory};
}

namespace {

nb::object lend(nb::handle shape, nb::handle strides, u8 code, u8 bits, s64 limit, bool lasts) {
    const Stay stay = lasts ? Stay::beyond_step : Stay::within_step;
    return lend_tensor(layout_of(shape, strides), {code, bits}, limit, stay).capsule;
}

std::tuple<s64, s64> sizes() {
    const PoolSizes all = pool_sizes();
    return {static_cast<s64>(all.lent), static_cast<s64>(all.idle)};
}

}  // namespace

void bind_pool(nb::module_& m) {
    m.def("pool_lend", &lend, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("lasts") = false);
    m.def("pool_offer", &pool_offer, nb::call_guard<nb::gil_scoped_release>());
    m.def("pool_release", &pool_release, nb::call_guard<nb::gil_scoped_release>());
    m.def("pool_sizes", &sizes);
}
