// SPDX-License-Identifier: Apache-2.0
// The words of this library: number types as in the literature, and the shape of a convolution.
//
// Legend: N C D H W input, K C T R S weight, N K OD OH OW output. 1-D and 2-D convolutions are 3-D ones with sizes of 1.
// All activations are NHWC (channels last, dense), all weights KRSC: a pixel's channels lie together.
#pragma once

#include <cstdint>

namespace byteback {

using s8 = int8_t;
using u8 = uint8_t;
using s16 = int16_t;
using u16 = uint16_t;
using s32 = int32_t;
using u32 = uint32_t;
using s64 = int64_t;
using u64 = uint64_t;
using f32 = float;
using f64 = double;

// The upper half of a float32, rounded to nearest, half to even; any NaN is 0x7FC0.
struct bf16 {
    u16 bits;
};

constexpr int kMax = 127;                                  // int8 values lie in [-127, 127]; -128 never occurs
constexpr s64 kInt32Depth = 2147483647LL / (kMax * kMax);  // the deepest sum that an int32 surely holds: 133 144

// A convolution. Index 0, 1, 2 of the arrays is depth (time), height, width.
struct ConvShape {
    s64 batch;        // N
    s64 in_channels;  // C, of all groups together
    s64 out_channels;
    s64 groups;
    s64 in[3];
    s64 kernel[3];
    s64 out[3];
    s64 stride[3];
    s64 padding[3];
    s64 dilation[3];

    s64 in_pixels() const { return in[0] * in[1] * in[2]; }
    s64 out_pixels() const { return out[0] * out[1] * out[2]; }
    s64 taps() const { return kernel[0] * kernel[1] * kernel[2]; }
    s64 group_in() const { return in_channels / groups; }
    s64 group_out() const { return out_channels / groups; }
};

// The factor that turns integers into floats: factor[i * row + j * column], strides of 0 where it does not vary.
//   output      row = n, column = k        grad_input  row = n, column = c        grad_weight  row = k, column = c in group
struct Factor {
    const f32* values;
    s64 row;
    s64 column;

    f32 at(s64 i, s64 j) const { return values[i * row + j * column]; }
};

inline s64 ceil_div(s64 a, s64 b) { return (a + b - 1) / b; }
inline s64 round_up(s64 a, s64 b) { return ceil_div(a, b) * b; }

}  // namespace byteback
