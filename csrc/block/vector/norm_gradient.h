// SPDX-License-Identifier: Apache-2.0
// dx = (p * gm + q * x) + r of norm.h, a vector of floats at a time. Compiled once per path, behind its vectors.
#pragma once

#include "block/vector/norm_rows.h"

namespace byteback::BYTEBACK_PATH {

namespace {

// `at` is the element, `k` where its channels' constants lie, `m` the mask's byte.
template <Stored stored, Gate gate, class Lanes>
BYTEBACK_INLINE Floats gradient_of(const Backward& from, s64 at, s64 k, s64 m, Lanes lanes) {
    const Floats x = kept_value<stored>(from.x, at, k, lanes);
    const Floats gm = gated<gate>(load_stored(from.g, from.g_kind, at, lanes), x, from, k, m, lanes);
    const Floats from_g = load(from.p + k) * gm;
    const Floats from_x = load(from.q + k) * x;
    return (from_g + from_x) + load(from.r + k);
}

// For walk_rows: the rows from start(row) on.
template <Stored stored, Gate gate>
struct GradientRun {
    Backward from;
    s64 at = 0, mask_row = 0;

    GradientRun(const Backward& given, s64 together) : from(with_constants(given, constants_of(given, together))) {}

    BYTEBACK_INLINE void start(s64 row) {
        at = row * from.channels;
        mask_row = row * mask_width(from.channels);
    }

    template <class Lanes>
    BYTEBACK_INLINE Floats value(s64 e, Lanes lanes) const {
        return gradient_of<stored, gate>(from, at + e, e, mask_row + e / 8, lanes);
    }
};

}  // namespace

}  // namespace byteback::BYTEBACK_PATH
