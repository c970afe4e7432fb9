// SPDX-License-Identifier: Apache-2.0
// A convolution and its factor as plain numbers, as Python hands them over (ops/native_kernels.py). Only for bindings*.cpp.
#pragma once

#include <algorithm>
#include <array>

#include "bindings/address.h"
#include "core/types.h"

namespace byteback {

using ShapeNumbers = std::array<s64, 22>;

inline ConvShape shape_of(const ShapeNumbers& n) {
    ConvShape s{n[0], n[1], n[2], n[3], {}, {}, {}, {}, {}, {}};
    s64(*arrays[])[3] = {&s.in, &s.kernel, &s.out, &s.stride, &s.padding, &s.dilation};
    for (size_t i = 0; i < 6; ++i) std::copy_n(n.begin() + 4 + 3 * static_cast<long>(i), 3, *arrays[i]);
    return s;
}

namespace {

// What a product's integers are multiplied by. second: 0 where `first` holds the whole factor; else both are single scales,
// whose product it is: two numbers are not worth a tensor operation of the caller's. The Factor points into this object.
class GivenFactor {
public:
    GivenFactor(Address first, Address second, s64 row, s64 column)
        : single_(second ? *at<const f32>(first) * *at<const f32>(second) : 0.0f),
          factor_{second ? &single_ : at<const f32>(first), row, column} {}
    GivenFactor(const GivenFactor&) = delete;
    GivenFactor& operator=(const GivenFactor&) = delete;
    const Factor& get() const { return factor_; }

private:
    f32 single_;
    Factor factor_;
};

}  // namespace

}  // namespace byteback
