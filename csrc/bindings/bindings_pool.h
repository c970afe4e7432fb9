// SPDX-License-Identifier: Apache-2.0
// Creates tensors for Python from the pool (bindings_pool.cpp). The caller must hold the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include "core/pool.h"

// A type of elements as DLPack names it.
struct ElementType {
    byteback::u8 code, bits;
};

constexpr ElementType kInt8{0, 8}, kInt64{0, 64}, kFloat32{2, 32};

// Sizes and strides of a dense tensor. Strides that would lead out of it are refused when it is made.
constexpr int kMostAxes = 8;
struct Layout {
    int axes;
    byteback::s64 shape[kMostAxes], strides[kMostAxes];
};

Layout layout_of(nanobind::handle shape, nanobind::handle strides);

struct Lent {
    nanobind::object capsule;  // torch._C._from_dlpack makes a tensor of it, once
    void* memory;
};

// A dense tensor of this layout, its contents whatever was there; limit and stay as in pool_lend.
Lent lend_tensor(const Layout& layout, ElementType type, byteback::s64 limit,
                 byteback::Stay stay = byteback::Stay::within_step);
