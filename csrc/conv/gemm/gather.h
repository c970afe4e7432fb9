// SPDX-License-Identifier: Apache-2.0
// Gather: where a pixel of a product's grid finds its operands in the source image, tap by tap.
//
//   source pixel = grid pixel * step + tap offset,   zeros where that falls outside the image
//
// Divisions and bound checks are the price of not copying the image with a halo, so they are paid once per line of pixels, and
// for each of the few pixels that have a tap outside.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/types.h"

namespace byteback {
namespace {

struct Tap {
    s64 offset[3];
    s64 weight;  // which of the kernel's taps
};

struct Pixel {
    s64 n, at[3];
};

inline Pixel pixel_of(s64 flat, const s64 (&size)[3]) {
    const s64 per_image = size[0] * size[1] * size[2], n = flat / per_image, r = flat % per_image;
    return {n, {r / (size[1] * size[2]), r / size[2] % size[1], r % size[2]}};
}

inline void next_pixel(Pixel& pixel, const s64 (&size)[3]) {
    if (++pixel.at[2] < size[2]) return;
    pixel.at[2] = 0;
    if (++pixel.at[1] < size[1]) return;
    pixel.at[1] = 0;
    if (++pixel.at[0] < size[0]) return;
    pixel.at[0] = 0;
    ++pixel.n;
}

// Taps side by side in the source and in what is packed: a pixel whose taps all lie inside copies them in one go.
struct Piece {
    s64 offset, length, position;
};

// Appends a piece, or joins it with the one before it.
inline void add_piece(std::vector<Piece>& pieces, const Piece& piece) {
    if (!pieces.empty()) {
        Piece& last = pieces.back();
        if (last.offset + last.length == piece.offset && last.position + last.length == piece.position) {
            last.length += piece.length;
            return;
        }
    }
    pieces.push_back(piece);
}

class Gather {
public:
    // One pixel of the grid, prepared.
    struct Origin {
        const s8* base;  // where a tap of offset 0 would read; valid for the others only if `inside`
        s64 n, at[3];
        bool inside;
    };

    // Pixels of the grid side by side. Those with all taps inside are begin .. end-1; for the i-th a tap of offset 0 reads
    // base + i * step.
    struct Line {
        const s8* base;
        s64 step, begin, end;
    };

    Gather() = default;
    Gather(const s8* source, const s64 (&size)[3], s64 channels, s64 first, s64 depth, const s64 (&step)[3],
           const std::vector<Tap>& taps)
        : source_(source + first), channels_(channels), taps_(taps), zeros_(static_cast<size_t>(depth) + 16, 0) {
        for (int axis = 0; axis < 3; ++axis) {
            size_[axis] = size[axis];
            step_[axis] = step[axis];
            for (const Tap& tap : taps) {
                low_[axis] = tap.offset[axis] < low_[axis] ? tap.offset[axis] : low_[axis];
                high_[axis] = tap.offset[axis] > high_[axis] ? tap.offset[axis] : high_[axis];
            }
        }
        for (const Tap& tap : taps)
            flat_.push_back(((tap.offset[0] * size[1] + tap.offset[1]) * size[2] + tap.offset[2]) * channels);
    }

    Origin origin(const Pixel& pixel) const {
        Origin o{source_, pixel.n, {}, true};
        s64 flat = pixel.n;
        for (int axis = 0; axis < 3; ++axis) {
            o.at[axis] = pixel.at[axis] * step_[axis];
            o.inside = o.inside && o.at[axis] + low_[axis] >= 0 && o.at[axis] + high_[axis] < size_[axis];
            flat = flat * size_[axis] + o.at[axis];
        }
        o.base += flat * channels_;
        return o;
    }

    // `count` pixels from `pixel` on, all in one line of the grid.
    Line line(const Pixel& pixel, s64 count) const {
        const Origin o = origin(pixel);
        Line l{o.base, step_[2] * channels_, 0, 0};
        for (int axis = 0; axis < 2; ++axis)
            if (o.at[axis] + low_[axis] < 0 || o.at[axis] + high_[axis] >= size_[axis]) return l;
        const s64 room = size_[2] - 1 - high_[2] - o.at[2];  // that the last pixel inside may be moved on by
        l.begin = std::clamp<s64>(ceil_div(-(o.at[2] + low_[2]), step_[2]), 0, count);
        l.end = room < 0 ? l.begin : std::clamp<s64>(room / step_[2] + 1, l.begin, count);
        return l;
    }

    // Of a pixel whose taps all lie inside, from where a tap of offset 0 reads.
    s64 offset(s64 tap) const { return flat_[static_cast<size_t>(tap)]; }

    const s8* at(const Origin& o, s64 tap) const {
        if (o.inside) return o.base + flat_[static_cast<size_t>(tap)];
        const Tap& t = taps_[static_cast<size_t>(tap)];
        for (int axis = 0; axis < 3; ++axis)
            if (o.at[axis] + t.offset[axis] < 0 || o.at[axis] + t.offset[axis] >= size_[axis]) return zeros_.data();
        return o.base + flat_[static_cast<size_t>(tap)];
    }

    const s8* zeros() const { return zeros_.data(); }
    s64 taps() const { return static_cast<s64>(taps_.size()); }

private:
    const s8* source_ = nullptr;
    s64 size_[3] = {}, step_[3] = {}, low_[3] = {}, high_[3] = {}, channels_ = 0;
    std::vector<Tap> taps_;
    std::vector<s64> flat_;
    std::vector<s8> zeros_;
};

// The taps of a convolution's forward direction: offset = tap * dilation - padding.
inline std::vector<Tap> forward_taps(const ConvShape& s) {
    std::vector<Tap> taps;
    for (s64 t = 0; t < s.taps(); ++t) {
        const s64 at[3] = {t / (s.kernel[1] * s.kernel[2]), t / s.kernel[2] % s.kernel[1], t % s.kernel[2]};
        Tap tap{{}, t};
        for (int axis = 0; axis < 3; ++axis) tap.offset[axis] = at[axis] * s.dilation[axis] - s.padding[axis];
        taps.push_back(tap);
    }
    return taps;
}

}  // namespace
}  // namespace byteback
