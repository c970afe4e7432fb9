// SPDX-License-Identifier: Apache-2.0
// A convolution as plain integers, as Python hands it over (ops/native_kernels.py). Only for bindings*.cpp.
#pragma once

#include <algorithm>
#include <array>

#include "types.h"

namespace byteback {

using ShapeNumbers = std::array<s64, 22>;

inline ConvShape shape_of(const ShapeNumbers& n) {
    ConvShape s{n[0], n[1], n[2], n[3], {}, {}, {}, {}, {}, {}};
    s64(*arrays[])[3] = {&s.in, &s.kernel, &s.out, &s.stride, &s.padding, &s.dilation};
    for (size_t i = 0; i < 6; ++i) std::copy_n(n.begin() + 4 + 3 * static_cast<long>(i), 3, *arrays[i]);
    return s;
}

}  // namespace byteback
