// SPDX-License-Identifier: Apache-2.0
// The last part of output and grad_input by Winograd: transforms products back to pixels and writes them as floats.
//
// Most tiles are whole and their sums are complete: they go from products to memory through registers (write_tile), two half
// lines of a pixel together. All others use store_tile, which handles every case.
//
// winograd_products.h has the algorithm. Compiled once per path.
#pragma once

#include <algorithm>

#include "block/epilogue.h"
#include "conv/winograd/winograd_memory.h"
#include "conv/winograd/winograd_transform.h"
#include "conv/winograd/winograd_weights.h"

namespace byteback {
namespace {

// y[n, i, h, w, j] = Σ_{t, r, s, d} x[n, i + shift + t, h + r - pad_h, w + s - pad_w, d] · weights[j, t, r, s, d]
struct Correlation {
    Tiling tiling;
    Weights weights;
    s64 height, width;  // of the result
    Factor factor;
    f32* y;
    bool streaming;          // past the caches: y is larger than they are, and made of whole cache lines
    const Epilogue* finish;  // null, or what gets the results instead of y
};

// Where a tile's pixels go.
struct TilePlace {
    s64 image, rows, cols;  // pixels that lie inside of the image
    s64 first;              // the upper left one
};

// One tile after the other, with one division for all.
class TileWalk {
public:
    TileWalk(const Correlation& correlation, s64 tile) : c(correlation) {
        const s64 per_image = c.tiling.per_image(), at = tile % per_image;
        image = tile / per_image, top = at / c.tiling.tiles_w * 4, left = at % c.tiling.tiles_w * 4;
    }
    TilePlace place() const {
        const s64 rows = std::min<s64>(4, c.height - top), cols = std::min<s64>(4, c.width - left);
        return {image, rows, cols, (image * c.height + top) * c.width + left};
    }
    void next() {
        if ((left += 4) < c.width) return;
        left = 0;
        if ((top += 4) < c.height) return;
        top = 0;
        ++image;
    }

private:
    const Correlation& c;
    s64 image, top, left;
};

// A whole tile of 16 whole columns, whose products are complete.
template <bool kStreaming>
inline void write_tile(const s32* products, const f32* factors, f32* y, s64 pixel, s64 row) {
    V half[kVectors][24];
    Floats scales[kVectors];
    for (int k = 0; k < kVectors; ++k) {
        output_columns(products + k * kLanes, half[k]);
        scales[k] = load_floats(factors + k * kLanes);
    }
    for (int i = 0; i < 4; ++i, y += row) {
        Floats out[kVectors][4];
        for (int k = 0; k < kVectors; ++k) {
            V values[4];
            output_1d(half[k] + 6 * i, 1, values, 1);
            for (int j = 0; j < 4; ++j) out[k][j] = scale(divide_by_576(values[j]), scales[k]);
        }
        for (int j = 0; j < 4; ++j)
            for (int k = 0; k < kVectors; ++k) {
                if (kStreaming)
                    stream_floats(y + j * pixel + k * kLanes, out[k][j]);
                else
                    store_floats(y + j * pixel + k * kLanes, out[k][j], kLanes);
            }
    }
}

// 4x4 x 16 integers to floats in y; the tile may stick out of the image, the panel out of the channels.
inline void store_tile(const Correlation& c, const TilePlace& at, s64 column, const f32* factors,
                       const V (&values)[kVectors][16]) {
    const s64 columns = c.weights.width - column;
    f32* corner = c.finish ? nullptr : c.y + at.first * c.weights.width + column;
    Floats scales[kVectors];
    for (int k = 0; k < kVectors; ++k) scales[k] = load_floats(factors + k * kLanes);
    for (s64 i = 0; i < at.rows; ++i)
        for (s64 j = 0; j < at.cols; ++j) {
            if (c.finish) {
                alignas(64) f32 own[kPanel];
                for (int k = 0; k < kVectors; ++k)
                    store_floats(own + k * kLanes, scale(values[k][i * 4 + j], scales[k]), kLanes);
                (*c.finish)(at.first + i * c.width + j, 1, column, std::min<s64>(kPanel, columns), own);
                continue;
            }
            f32* y = corner + (i * c.width + j) * c.weights.width;
            for (int k = 0; k < kVectors; ++k) {
                const Floats v = scale(values[k][i * 4 + j], scales[k]);
                if (c.streaming)
                    stream_floats(y + k * kLanes, v);
                else
                    store_floats(y + k * kLanes, v, columns - k * kLanes);
            }
        }
}

// Products of one tile and panel to results; earlier chunks are added, later ones are still to come unless `last`.
inline void finish_tile(const Correlation& c, const TilePlace& at, s64 column, const f32* factors, const s32* products,
                        s32* sums, bool first, bool last) {
    V values[kVectors][16];
    for (int k = 0; k < kVectors; ++k) {
        V half[24];
        output_columns(products + k * kLanes, half);
        for (int i = 0; i < 4; ++i) output_1d(half + 6 * i, 1, values[k] + 4 * i, 1);
        for (int i = 0; i < 16; ++i) {
            s32* earlier = sums + i * kPanel + k * kLanes;
            V v = divide_by_576(values[k][i]);
            if (!first) v = add32(v, load(earlier));
            if (!last) store(earlier, v);
            values[k][i] = v;
        }
    }
    if (last) store_tile(c, at, column, factors, values);
}

// One tile and `panels` panels from `column` on, whose products and sums lie `stride` tiles apart.
inline void finish_panels(const Correlation& c, const TilePlace& at, s64 column, s64 panels, const f32* factors,
                          const s32* products, s32* sums, s64 stride, bool first, bool last) {
    const s64 pixel = c.weights.width, row = c.width * pixel;
    const bool whole = first && last && !c.finish && at.rows == 4 && at.cols == 4;
    for (s64 panel = 0; panel < panels; ++panel, column += kPanel, factors += kPanel) {
        const s32* from = products + panel * stride * kTile;
        if (!whole || column + kPanel > c.weights.width)
            finish_tile(c, at, column, factors, from, sums + panel * stride * 16 * kPanel, first, last);
        else if (c.streaming)
            write_tile<true>(from, factors, c.y + at.first * pixel + column, pixel, row);
        else
            write_tile<false>(from, factors, c.y + at.first * pixel + column, pixel, row);
    }
}

}  // namespace
}  // namespace byteback
