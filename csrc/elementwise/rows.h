// SPDX-License-Identifier: Apache-2.0
// Shared by quantize and the statistics: the definition of a clip, and how rows of channels are split into units of work.
//
// In an anonymous namespace, so that each path compiles its own copy: the linker could use AVX2 code on a machine without it.
#pragma once

#include "contract.h"

namespace byteback {

namespace {

constexpr s64 kSmallWork = 1 << 14;  // elements below which a second thread costs more than it saves
constexpr s64 kUnitWork = 1 << 13;   // elements of a unit of work, roughly
constexpr s64 kPeriod = 1 << 10;     // elements of the rows that are taken together
constexpr s64 kTile = 1 << 11;       // channels of a tile

// dot_terms where a channel has one scale: it is taken out of the sums of x·q and q·q.
inline void scale_dots(PerScale scale, s64 channels, f64* products, f64* squares) {
    for (s64 c = 0; c < channels; ++c) {
        const f64 s = scale.at(0, c);
        products[c] *= s;
        squares[c] *= s * s;
    }
}

// The last two of cosine_slope_terms, from the first three and from x·x and x·q of what lies beyond the clip:
// d = q there, else q - 127 x / clip.
inline void slope_terms(f32 clip, f64 square_beyond, f64 product_beyond, f64* terms) {
    const f64 rate = static_cast<f64>(kMax) / f64{clip};
    terms[3] = terms[0] - rate * (terms[2] - square_beyond);
    terms[4] = terms[1] - rate * (terms[0] - product_beyond);
}

inline int useful_threads(int threads, s64 elements) {
    const s64 useful = 1 + elements / kSmallWork;
    return static_cast<int>(useful < threads ? useful : threads);
}

// The same rows with as few outer blocks as possible. Not for what varies along `outer`.
inline Rows merged(Rows rows) {
    if (rows.channels == 1) rows.channel_stride = 1;
    if (rows.inner == 1) rows.inner_stride = rows.outer_stride;
    if (rows.outer == 1 || rows.outer_stride == rows.inner * rows.inner_stride) {
        rows.inner *= rows.outer;
        rows.outer = 1;
    }
    return rows;
}

inline s64 greatest_divisor(s64 a, s64 b) { return b ? greatest_divisor(b, a % b) : a; }

// Channels-last rows as units of work: (tile of channels) x (outer block) x (chunk of rows), in this order.
// Where whole rows lie one behind the other, `together` rows count as one long row of about kPeriod elements. So a narrow
// tensor runs through the same long loops as a wide one.
struct Cut {
    s64 tile, tiles, together, chunk, chunks, outer;

    struct Unit {
        s64 channel, width;  // the tile
        s64 outer;
        s64 begin, end;  // rows of the outer block
    };

    explicit Cut(const Rows& rows) : outer(rows.outer) {
        const bool dense = rows.inner_stride == rows.channels && rows.channels <= kPeriod;
        tile = rows.channels < kTile ? rows.channels : kTile;
        tiles = tile ? ceil_div(rows.channels, tile) : 0;
        together = dense && tile ? kPeriod / tile : 1;
        if (together > rows.inner) together = rows.inner > 0 ? rows.inner : 1;
        // A multiple of 64 elements, the longest block of any path, saves the kernels a ragged end in every period.
        const s64 even = 64 / greatest_divisor(64, tile);
        if (together > even) together -= together % even;
        chunk = tile ? round_up(ceil_div(kUnitWork, tile), together) : 1;
        chunks = ceil_div(rows.inner, chunk);
    }

    s64 units() const { return tiles * outer * chunks; }
    s64 period() const { return together * tile; }

    Unit unit(const Rows& rows, s64 index) const {
        const s64 k = index % chunks, o = index / chunks % outer, t = index / chunks / outer;
        const s64 last = (k + 1) * chunk, channels = rows.channels - t * tile;
        return {t * tile, channels < tile ? channels : tile, o, k * chunk, last < rows.inner ? last : rows.inner};
    }
};

}  // namespace

}  // namespace byteback
