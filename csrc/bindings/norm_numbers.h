// SPDX-License-Identifier: Apache-2.0
// From the plain numbers that Python hands over to the arguments of norm.h, for the bindings of the passes.
#pragma once

#include <array>

#include "bindings/address.h"
#include "block/norm.h"
#include "elementwise/rows.h"

namespace byteback {

namespace {

inline Noise noise_of(Address key) {
    const s64* words = at<const s64>(key);
    return {key != 0, key ? static_cast<u32>(words[0]) : 0, key ? static_cast<u32>(words[1]) : 0};
}

inline void write_scales(const f32* clips, s64 count, f32* scales) {
    for (s64 i = 0; i < count; ++i) scales[i] = is_live(clips[i]) ? clips[i] / static_cast<f32>(kMax) : 1.0f;
}

inline void write_counts(const Report& report, Address counts) {
    at<s64>(counts)[0] = report.saturated;
    at<s64>(counts)[1] = report.nonfinite;
}

// A residual that has a scale is int8.
inline Forward forward_of(s64 rows, s64 channels, Address x, Address a, Address b, Address residual, Address scale, int activation) {
    return {rows,
            channels,
            at<const f32>(x),
            at<const f32>(a),
            at<const f32>(b),
            at<const f32>(scale ? 0 : residual),
            at<const s8>(scale ? residual : 0),
            scale ? *at<const f32>(scale) : 0.0f,
            static_cast<Activation>(activation)};
}

// rows, channels, g, x, kind of x, its step and centre, a, b, mask, gate, p, q, r
using BackwardNumbers = std::array<Address, 14>;

inline Backward backward_of(const BackwardNumbers& n) {
    const Kept x{at<const void>(n[3]), static_cast<Stored>(n[4]), at<const f32>(n[5]), at<const f32>(n[6])};
    return {static_cast<s64>(n[0]), static_cast<s64>(n[1]), at<const f32>(n[2]), x, at<const f32>(n[7]), at<const f32>(n[8]),
            at<const u8>(n[9]), static_cast<Gate>(n[10]), at<const f32>(n[11]), at<const f32>(n[12]), at<const f32>(n[13])};
}

}  // namespace

}  // namespace byteback
