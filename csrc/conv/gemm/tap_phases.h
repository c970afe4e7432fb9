// SPDX-License-Identifier: Apache-2.0
// grad_input with a stride: which of its pixels meet the same taps, and taps that are side by side.
#pragma once

#include <vector>

#include "conv/gemm/gemm_weights.h"

namespace byteback {
namespace {

// The grad_input pixels i with (i + padding) % stride == phase, and the taps that reach them.
inline bool phase_of(const ConvShape& s, const s64 (&phase)[3], Product& p) {
    for (int axis = 0; axis < 3; ++axis) {
        const s64 start = ((phase[axis] - s.padding[axis]) % s.stride[axis] + s.stride[axis]) % s.stride[axis];
        p.result_start[axis] = start;
        p.result_step[axis] = s.stride[axis];
        p.grid[axis] = start < s.in[axis] ? ceil_div(s.in[axis] - start, s.stride[axis]) : 0;
    }
    p.taps.clear();
    for (s64 t = 0; t < s.taps(); ++t) {
        const s64 at[3] = {t / (s.kernel[1] * s.kernel[2]), t / s.kernel[2] % s.kernel[1], t % s.kernel[2]};
        Tap tap{{}, t};
        bool meets = true;
        for (int axis = 0; axis < 3; ++axis) {
            // Output pixel o with o * stride = i + padding - t * dilation, for i = start + grid * stride.
            const s64 from = p.result_start[axis] + s.padding[axis] - at[axis] * s.dilation[axis];
            meets = meets && from % s.stride[axis] == 0;
            tap.offset[axis] = from / s.stride[axis];
        }
        if (meets) p.taps.push_back(tap);
    }
    return p.grid_pixels() > 0;
}

// Which phases of an axis are reached by a tap: not all if the stride is larger than the kernel, or shares a divisor with the
// dilation.
inline std::vector<char> phases_met(const ConvShape& s, int axis) {
    std::vector<char> met(static_cast<size_t>(s.stride[axis]), 0);
    for (s64 t = 0; t < s.kernel[axis]; ++t) met[static_cast<size_t>(t * s.dilation[axis] % s.stride[axis])] = 1;
    return met;
}

inline bool leaves_pixels_out(const ConvShape& s) {
    for (int axis = 0; axis < 3; ++axis)
        for (char met : phases_met(s, axis))
            if (!met) return true;
    return false;
}

// Taps of one row, side by side.
struct TapRun {
    s64 row, column;  // offset of the first
    s64 first, taps;
};

inline std::vector<TapRun> tap_runs(const std::vector<Tap>& taps) {
    std::vector<TapRun> runs;
    for (s64 t = 0; t < static_cast<s64>(taps.size()); ++t) {
        const s64 row = taps[static_cast<size_t>(t)].offset[1], column = taps[static_cast<size_t>(t)].offset[2];
        if (!runs.empty() && runs.back().row == row && runs.back().column + runs.back().taps == column)
            ++runs.back().taps;
        else
            runs.push_back({row, column, t, 1});
    }
    return runs;
}

}  // namespace
}  // namespace byteback
