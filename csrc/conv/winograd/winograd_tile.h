// SPDX-License-Identifier: Apache-2.0
// The sizes that all Winograd code uses. Each path has its own winograd_vector_*.h and winograd_kernel_*.h, with the vectors
// and the multiply. The other headers are compiled once per path, so everything in them is in an anonymous namespace.
#pragma once

#include "core/types.h"

namespace byteback {
namespace {

constexpr int kPositions = 36;                   // of a 6x6 Winograd tile
constexpr int kPanel = 16;                       // columns that are multiplied at a time
constexpr s64 kTile = s64{kPositions} * kPanel;  // products of one row and one panel: [position][column], a cache line each

// products[i * kTile + panel * products_panel + j] = Σ_pair a[i, pair] · b[panel, pair, j], for at least one pair. Row i of a
// begins at a + i * row bytes, its next pair is `step` bytes on, so that rows may be one after the other (output) or
// interleaved (grad_weight). A panel of b is dense, 64 bytes a pair; the next one is b_panel values on.
struct Multiply {
    const char* a;
    s64 row, step;
    const s16* b;
    s64 b_panel, pairs;
    s32* products;
    s64 products_panel;
};

// What a multiply asks the caches for while it runs: with each pair of its depth the line at `at`, which then moves on by
// `step` bytes.
struct Ahead {
    const char* at;
    s64 step;
};

// How often a multiply with one panel is done in one call, and how far it moves on each time: `a` in bytes, `b` and the
// products in values.
struct Repeat {
    s64 count = 1, a = 0, b = 0, products = 0;
};

// The 36 values of a tile as emit(position, vector); read(i) is the vector of pixel i (winograd_transform.h).
template <class Transform, class Read, class Emit>
inline void transform_tile(const Read& read, const Emit& emit);

}  // namespace
}  // namespace byteback
