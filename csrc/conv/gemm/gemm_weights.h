// SPDX-License-Identifier: Apache-2.0
// What a product of gemm_product.h and gemm_phases.h is made of, and its weights packed into panels.
#pragma once

#include <cstring>
#include <vector>

#include "block/epilogue.h"
#include "conv/gemm/gather.h"
#include "conv/gemm/gemm_block.h"
#include "core/parallel.h"

namespace byteback {
namespace {

struct Product {
    Gather from;
    s64 depth;  // channels summed per tap
    s64 batch, grid[3];
    std::vector<Tap> taps;
    f32* result;
    const s64* result_size;
    s64 result_channels, result_begin, columns;
    s64 result_start[3], result_step[3];
    Factor factor;
    const Epilogue* finish;  // null, or what gets the rows instead of `result`

    s64 grid_pixels() const { return grid[0] * grid[1] * grid[2]; }
};

// A stretch of the packed depth that is multiplied in one go.
struct DepthPart {
    s64 start, length;
};

// One group's weights, w[k][tap][c], as the product reads them: depth along c and columns along k (output), or the reverse.
struct Weights {
    const s8* w;
    s64 taps, C;
    bool columns_are_k;

    const s8* row(s64 k, s64 tap) const { return w + (k * taps + tap) * C; }
};

constexpr s64 kSmallWeights = 32 << 10;  // bytes packed in less time than threads need to meet

struct WeightScratch {};
struct RowScratch {};

// A panel whose depth lies together in memory: 16 rows are widened, then their 4-byte steps are turned from [row][step] to
// [step][row].
template <class Micro>
void pack_panel_of_rows(const Product& p, const Weights& w, s64 tap, s64 column, s64 padded, char* to) {
    const s64 length = padded * Micro::kBytes, stride = round_up(length + 32, 64), steps = length / 4;
    char* rows = scratch<RowScratch>(static_cast<size_t>(stride * kColumns));
    std::memset(rows, 0, static_cast<size_t>(stride * kColumns));
    for (s64 j = 0; j < std::min(kColumns, p.columns - column); ++j) {
        Micro::pack_row_b(rows + j * stride, w.row(column + j, tap), p.depth);
        const s64 filled = p.depth * Micro::kBytes;
        std::memset(rows + j * stride + filled, 0, static_cast<size_t>(length - filled));
    }
    turn_panel(rows, stride, steps, to);
}

constexpr s64 kPackDepth = 256;  // of a tap, interleaved by one thread

// Panels whose columns lie together: `kUnit` rows at a time are interleaved.
template <class Micro>
void pack_columns(const Product& p, const Weights& w, s64 tap, s64 begin, s64 end, s64 panel_bytes, const s8* zeros, char* to) {
    for (s64 l = begin; l < end; l += Micro::kUnit) {
        const s8* from[4];
        for (int u = 0; u < Micro::kUnit; ++u) from[u] = l + u < p.depth ? w.row(l + u, tap) : zeros;
        Micro::interleave_b(to + l * kColumns * Micro::kBytes, from, p.columns, p.columns, panel_bytes);
    }
}

struct PackedWeights {
    const char* panels;  // [columns / 16][padded depth / unit][16][unit]
    const s32* starts;   // [part][columns]: from where the sums of a column begin in each part of the depth
    s64 width;           // columns, rounded up to whole panels

    const s32* start(s64 part, s64 column) const { return starts + part * width + column; }
};

template <class Micro>
s64 packed_bytes(const Product& p, s64 padded, s64 parts) {
    const s64 panels = ceil_div(p.columns, kColumns), length = static_cast<s64>(p.taps.size()) * padded;
    return round_up(panels * length * kColumns * Micro::kBytes, 64) + round_up(parts * panels * kColumns * 4, 64);
}

// Into `packed`, of packed_bytes. The depth is going to be multiplied in `parts`, each of which takes off the offset of its own
// columns and no other: so a part's sums are those of its own products, however parts are added up, and in which width.
template <class Micro>
PackedWeights pack_weights(const Product& p, const Weights& w, s64 padded, const std::vector<DepthPart>& parts, int threads,
                           char* packed) {
    const s64 taps = static_cast<s64>(p.taps.size()), panels = ceil_div(p.columns, kColumns), length = taps * padded;
    const s64 panel_bytes = length * kColumns * Micro::kBytes, all = round_up(panels * panel_bytes, 64);
    s32* starts = reinterpret_cast<s32*>(packed + all);
    if (all < kSmallWeights) threads = 1;
    if (w.columns_are_k) {
        parallel_for(threads, panels * taps, [&](s64 job) {
            const s64 column = job / taps * kColumns, t = job % taps, tap = p.taps[static_cast<size_t>(t)].weight;
            pack_panel_of_rows<Micro>(p, w, tap, column, padded,
                                      packed + (column * length + t * padded * kColumns) * Micro::kBytes);
        });
    } else {
        const s64 pieces = ceil_div(padded, kPackDepth);
        const std::vector<s8> zeros(static_cast<size_t>(p.columns), 0);
        parallel_for(threads, taps * pieces, [&](s64 job) {
            const s64 t = job / pieces, begin = job % pieces * kPackDepth, end = std::min(padded, begin + kPackDepth);
            pack_columns<Micro>(p, w, p.taps[static_cast<size_t>(t)].weight, begin, end, panel_bytes, zeros.data(),
                                packed + t * padded * kColumns * Micro::kBytes);
        });
    }
    if (Micro::kOffset)
        parallel_for(threads, panels, [&](s64 panel) {
            s32* to = starts + panel * kColumns;
            for (const DepthPart& part : parts) {
                const char* B = packed + panel * panel_bytes + part.start * kColumns * Micro::kBytes;
                Micro::column_starts(B, part.length / Micro::kUnit, to);
                to += panels * kColumns;
            }
        });
    return {packed, starts, panels * kColumns};
}

}  // namespace
}  // namespace byteback
