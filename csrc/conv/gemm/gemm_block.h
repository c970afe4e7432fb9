// SPDX-License-Identifier: Apache-2.0
// What a multiply kernel (`Micro` in gemm_micro_*.h) multiplies: some rows of A by some columns of B, summed over the depth.
//
// One step of the depth is 4 bytes of a row of A and of a column of B. B lies in panels of 16 columns:
//
//        A  [row][step][4 bytes] or [step][row][4 bytes]
//        B  [panel][step][16 columns][4 bytes]
//
// A Micro has the numbers
//   kUnit, kBytes         depth of a step; bytes of a packed value (kUnit * kBytes is 4)
//   kRows, kPanels        rows and panels of its largest block
//   kExact                whether it computes only the rows and columns that a block asks for. If not, it computes kRows rows
//                         of whole panels, and rows of A and of the sums up to there must exist
//   kOffset               added to A when packed, and taken off by the starts of the sums
//   kDepth, kTileRows     depth of a block in gemm_product.h, rows of a tile in gemm_grad_weight.h, for the first-level cache
//   kTileStep             rows of a tile are a multiple of it
//   kNearBytes            of the packed rows of A that meet all panels before the next ones come
//   kSumsBytes            of dW: up to here each thread keeps its own in the second-level cache
//   kPackedBytes          of both operands of dW that are packed at a time
// and the functions
//   pack_row_a, pack_row_b        n values of one row. May write up to 15 values past the end
//   interleave_a, interleave_b    n values of kUnit rows, of which `readable` may be read: [value][row]. Every 16 values, the
//                                 next ones go `sixteen` bytes on. May write up to 15 values past the end
//   column_starts                 the starts of a panel
//   multiply_sums, multiply_floats
#pragma once

#include "core/types.h"

namespace byteback {
namespace {

constexpr s64 kColumns = 16;  // of a panel

// Steps that follow each other in both operands.
struct Stretch {
    const char *A, *B;
    s64 steps;  // at least one
};

struct GemmBlock {
    const Stretch* depth;
    s64 stretches;      // at least one
    s64 row, step;      // bytes from a row of A to the next, and from a step
    s64 panel;          // bytes from a panel of B to the next
    s64 rows, columns;  // up to kRows and kPanels * kColumns
    const s32* starts;  // of the columns: from where their sums begin
};

// Sums go to to[row * stride + panel * panel_stride + column of the panel], or are added to what is there.
struct SumsTo {
    s32* to;
    s64 stride, panel;
    bool add;
};

// Sums times their factors go to rows[row][column...]; a row without a pointer goes nowhere. All have the first factor if they
// do not vary. `stream` bypasses the caches: for results that are larger than the caches anyway, whose panels are whole and lie
// on 64-byte boundaries.
struct FloatsTo {
    f32* const* rows;
    s64 column;
    const f32* factors;  // of the first column
    bool vary, stream;
};

}  // namespace
}  // namespace byteback
