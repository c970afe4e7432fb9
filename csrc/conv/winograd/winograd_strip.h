// SPDX-License-Identifier: Apache-2.0
// Transforms a few tiles at a time from bytes to the Winograd domain.
//
// Neighbouring tiles of 6x6 pixels share two columns, so the transform along the columns is done once per column of a strip of
// tiles, and only the transform along the rows is done once per tile. The intermediate result is the strip: [column][6]
// vectors, in the first-level cache. Pixels outside the image take almost no time: columns outside are stored as zeros, and
// rows outside all read the same row of zeros. While a strip is transformed, the pixels of the tiles below are fetched.
//
// Compiled once per path, with its winograd_vector_*.h.
#pragma once

#include <algorithm>

#include "conv/winograd/winograd_transform.h"

namespace byteback {
namespace {

constexpr s64 kStripTiles = 8;  // an even number

struct InputTransform {
    static constexpr int kSize = 6;
    template <class T>
    __attribute__((always_inline)) static void apply_1d(const T* in, int from, T* out, int to) {
        input_1d(in, from, out, to);
    }
};

struct GradientTransform {
    static constexpr int kSize = 4;
    template <class T>
    __attribute__((always_inline)) static void apply_1d(const T* in, int from, T* out, int to) {
        gradient_1d(in, from, out, to);
    }
};

// Tiles side by side in one row of tiles. Columns `before` and `after` lie outside of the image.
template <int kSize>
struct Stretch {
    const s8* rows[kSize];  // at the first column that is inside
    s64 steps[kSize];       // bytes from pixel to pixel; 0 where the row lies outside, and `rows` are zeros
    s64 before, inside, after;
};

template <class Transform>
class Strip {
public:
    static constexpr int kSize = Transform::kSize;

    static constexpr s64 size() { return kStripTiles * kSize * 6; }  // vectors

    // Tiles first .. last-1, at most kStripTiles, under a time tap. Tiles from `t.count` on are zeros.
    Strip(const Tiling& t, s64 first, s64 last, s64 tap) : ahead_(4 * t.width * t.channels) {
        for (s64 tile = first; tile < last;) {
            const s64 in_row = t.tiles_w - tile % t.tiles_w;
            const s64 tiles = tile < t.count ? std::min({in_row, last - tile, t.count - tile}) : last - tile;
            const s64 columns = 4 * (tiles - 1) + kSize;
            for (s64 i = 0; i < tiles; ++i) starts_[tile - first + i] = columns_ + 4 * i;
            columns_ += columns;
            add(t, tile, tap, columns);
            tile += tiles;
        }
    }

    // Transforms the columns of the channels that `load` reads as a vector T.
    template <class T, class Load>
    __attribute__((always_inline)) void transform_columns(s64 channel, const Load& load, T* strip) const {
        for (s64 i = 0; i < count_; ++i) {
            const Stretch<kSize>& s = stretches_[i];
            strip = store_zeros(strip, s.before);
            const s8* rows[kSize];
            for (int r = 0; r < kSize; ++r) rows[r] = s.rows[r] + channel;
            for (s64 x = 0; x < s.inside; ++x, strip += 6) {
                T pixels[kSize];
                for (int r = 0; r < kSize; ++r) {
                    pixels[r] = load(rows[r]);
                    if (r >= kSize - 4) __builtin_prefetch(rows[r] + ahead_);
                    rows[r] += s.steps[r];
                }
                Transform::apply_1d(pixels, 1, strip, 1);
            }
            strip = store_zeros(strip, s.after);
        }
    }

    // Row i of the `tile`-th tile, six values, from its transformed columns.
    template <class T>
    __attribute__((always_inline)) void transform_row(const T* strip, s64 tile, int i, T row[6]) const {
        Transform::apply_1d(strip + starts_[tile] * 6 + i, 6, row, 1);
    }

private:
    template <class T>
    static T* store_zeros(T* strip, s64 columns) {
        std::fill_n(strip, columns * 6, T{});
        return strip + columns * 6;
    }

    void add(const Tiling& t, s64 tile, s64 tap, s64 columns) {
        Stretch<kSize>& s = stretches_[count_++];
        const s64 result = tile / t.per_image(), at = tile % t.per_image();
        const s64 frame = result % t.result_frames + t.shift + tap;
        const s64 top = at / t.tiles_w * 4 - t.pad_h, left = at % t.tiles_w * 4 - t.pad_w;
        s.before = std::clamp<s64>(-left, 0, columns);
        s.inside = std::clamp<s64>(t.width - left, s.before, columns) - s.before;
        if (tile >= t.count || frame < 0 || frame >= t.frames) s.inside = 0;
        s.after = columns - s.before - s.inside;
        const s64 image = result / t.result_frames * t.frames + frame;
        for (int r = 0; r < kSize; ++r) {
            const s64 y = top + r;
            const bool outside = s.inside == 0 || y < 0 || y >= t.height;
            s.rows[r] = outside ? t.zeros : t.data + ((image * t.height + y) * t.width + left + s.before) * t.channels;
            s.steps[r] = outside ? 0 : t.channels;
        }
    }

    Stretch<kSize> stretches_[kStripTiles];
    s64 starts_[kStripTiles];  // the first column of each tile
    s64 count_ = 0, columns_ = 0;
    s64 ahead_;  // bytes to the tiles below
};

}  // namespace
}  // namespace byteback
