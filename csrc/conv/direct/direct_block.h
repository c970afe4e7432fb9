// SPDX-License-Identifier: Apache-2.0
// What the multiply kernel of the direct convolution (x86/direct_micro_*.h) multiplies: a few pixels of the result by 16 or
// 32 of its channels, summed over the taps and the channels of the source.
//
// The source is rows of pixels, with zeros around the image. A tap is a distance in it that is the same for every pixel,
// and taps side by side are one stretch of bytes:
//
//        A  [row][column][channel], 4 channels to a step
//        B  [panel of 16 result channels][tap][step][16 channels][4 bytes]
#pragma once

#include "core/types.h"

namespace byteback {
namespace {

// Taps side by side.
struct TapStretch {
    s64 offset;  // of their first byte, from the pixel's own place in the source
    s64 start;   // of their weights in a panel, in bytes
    s64 steps;   // at least one
};

constexpr int kMostGroups = 6;

// Pixels come in groups of 4 or 7 that are side by side, the last of which may have fewer; a group may be anywhere.
struct DirectBlock {
    const char* A[kMostGroups];  // of the first pixel of each group
    f32* to[kMostGroups];        // its first column
    s64 group, pixels;           // 4 or 7; up to most_pixels of the kernel, whole groups if they are of 4
    const char* B;               // of the first panel
    const TapStretch* depth;
    s64 stretches;       // at least one
    s64 pixel;           // bytes from a pixel to the next
    s64 panel;           // bytes from a panel of B to the next
    s64 panels;          // 1 or 2
    s64 columns;         // of the panels, those that there are
    const s32* starts;   // of the columns: from where their sums begin
    s64 step;            // floats from a pixel of the result to the next
    const f32* factors;  // of the first column; all have this one if they do not vary
    bool vary, stream;   // `stream` bypasses the caches: where panels are whole, and on boundaries of 64 bytes
};

}  // namespace
}  // namespace byteback
