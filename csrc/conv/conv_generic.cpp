// SPDX-License-Identifier: Apache-2.0
// The three products of a convolution in simple loops.
//
//   output[n,o,k]      = Σ_{t,c} x[n, o*stride - padding + t*dilation, c] * w[k,t,c]
//   grad_input[n,i,c]  = Σ_{t,k} g[n, (i + padding - t*dilation)/stride, k] * w[k,t,c]      where the division is even
//   grad_weight[k,t,c] = Σ_{n,o} g[n,o,k] * x[n, o*stride - padding + t*dilation, c]
//
// Sums are s64 and cannot overflow. o, i and t each stand for the three spatial indices.
#include <vector>

#include "core/generic.h"
#include "core/parallel.h"

namespace byteback::generic {

namespace {

struct Index3 {
    s64 d, h, w;
};

Index3 split(s64 flat, const s64 (&size)[3]) { return {flat / (size[1] * size[2]), flat / size[2] % size[1], flat % size[2]}; }

// The input pixel that output pixel o meets under tap t, or -1 in the padding.
s64 input_pixel(const ConvShape& s, Index3 o, Index3 t) {
    const s64 at[3] = {o.d * s.stride[0] - s.padding[0] + t.d * s.dilation[0],
                       o.h * s.stride[1] - s.padding[1] + t.h * s.dilation[1],
                       o.w * s.stride[2] - s.padding[2] + t.w * s.dilation[2]};
    for (int axis = 0; axis < 3; ++axis)
        if (at[axis] < 0 || at[axis] >= s.in[axis]) return -1;
    return (at[0] * s.in[1] + at[1]) * s.in[2] + at[2];
}

// The output pixel that meets input pixel i under tap t, or -1 where none does.
s64 output_pixel(const ConvShape& s, Index3 i, Index3 t) {
    const s64 from[3] = {i.d + s.padding[0] - t.d * s.dilation[0], i.h + s.padding[1] - t.h * s.dilation[1],
                         i.w + s.padding[2] - t.w * s.dilation[2]};
    s64 at[3];
    for (int axis = 0; axis < 3; ++axis) {
        if (from[axis] < 0 || from[axis] % s.stride[axis]) return -1;
        at[axis] = from[axis] / s.stride[axis];
        if (at[axis] >= s.out[axis]) return -1;
    }
    return (at[0] * s.out[1] + at[1]) * s.out[2] + at[2];
}

}  // namespace

void conv_output(const ConvShape& s, const s8* x, const s8* w, Factor factor, f32* y, int threads) {
    const s64 C = s.group_in(), K = s.group_out(), taps = s.taps();
    parallel_for(threads, s.batch * s.out_pixels(), [&](s64 pixel) {
        const s64 n = pixel / s.out_pixels();
        const Index3 o = split(pixel % s.out_pixels(), s.out);
        std::vector<const s8*> source(taps);
        for (s64 t = 0; t < taps; ++t) {
            const s64 p = input_pixel(s, o, split(t, s.kernel));
            source[t] = p < 0 ? nullptr : x + (n * s.in_pixels() + p) * s.in_channels;
        }
        for (s64 k = 0; k < s.out_channels; ++k) {
            s64 sum = 0;
            for (s64 t = 0; t < taps; ++t) {
                if (!source[t]) continue;
                const s8* a = source[t] + k / K * C;
                const s8* b = w + (k * taps + t) * C;
                for (s64 c = 0; c < C; ++c) sum += s32{a[c]} * s32{b[c]};
            }
            y[pixel * s.out_channels + k] = static_cast<f32>(sum) * factor.at(n, k);
        }
    });
}

void conv_grad_input(const ConvShape& s, const s8* g, const s8* w, Factor factor, f32* dx, int threads) {
    const s64 C = s.group_in(), K = s.group_out(), taps = s.taps();
    parallel_for(threads, s.batch * s.in_pixels(), [&](s64 pixel) {
        const s64 n = pixel / s.in_pixels();
        const Index3 i = split(pixel % s.in_pixels(), s.in);
        std::vector<s64> sum(s.in_channels, 0);
        for (s64 t = 0; t < taps; ++t) {
            const s64 p = output_pixel(s, i, split(t, s.kernel));
            if (p < 0) continue;
            const s8* a = g + (n * s.out_pixels() + p) * s.out_channels;
            for (s64 k = 0; k < s.out_channels; ++k) {
                const s8* b = w + (k * taps + t) * C;
                s64* row = sum.data() + k / K * C;
                for (s64 c = 0; c < C; ++c) row[c] += s32{a[k]} * s32{b[c]};
            }
        }
        for (s64 c = 0; c < s.in_channels; ++c) dx[pixel * s.in_channels + c] = static_cast<f32>(sum[c]) * factor.at(n, c);
    });
}

void conv_grad_weight(const ConvShape& s, const s8* g, const s8* x, Factor factor, f32* dw, int threads) {
    const s64 C = s.group_in(), K = s.group_out(), taps = s.taps();
    parallel_for(threads, s.out_channels * taps, [&](s64 row) {
        const s64 k = row / taps;
        const Index3 t = split(row % taps, s.kernel);
        std::vector<s64> sum(C, 0);
        for (s64 pixel = 0; pixel < s.batch * s.out_pixels(); ++pixel) {
            const s64 n = pixel / s.out_pixels();
            const s64 p = input_pixel(s, split(pixel % s.out_pixels(), s.out), t);
            if (p < 0) continue;
            const s32 a = g[pixel * s.out_channels + k];
            const s8* b = x + (n * s.in_pixels() + p) * s.in_channels + k / K * C;
            for (s64 c = 0; c < C; ++c) sum[c] += a * s32{b[c]};
        }
        for (s64 c = 0; c < C; ++c) dw[row * C + c] = static_cast<f32>(sum[c]) * factor.at(k, c);
    });
}

}  // namespace byteback::generic
