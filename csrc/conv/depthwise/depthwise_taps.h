// SPDX-License-Identifier: Apache-2.0
// Depthwise output and grad_input of any kernel: sums over the taps that are inside the image, for each pixel.
//
// For depthwise.h only. Compiled once per path, after its vectors.
#pragma once

#include "conv/depthwise/depthwise_pairs.h"

namespace byteback {
namespace {

// How the positions of one axis meet: the source position that `destination` meets under tap t, or -1.
struct Meeting {
    bool grad_input;
    s64 stride, padding, dilation, size;  // size: of the source

    s64 source(s64 destination, s64 t) const {
        s64 at = grad_input ? destination + padding - t * dilation : destination * stride - padding + t * dilation;
        if (at < 0) return -1;
        if (grad_input) {
            if (at % stride) return -1;
            at /= stride;
        }
        return at < size ? at : -1;
    }
};

// Any kernel in three dimensions, from frames of `from` to frames of `to` pixels.
struct TapProduct {
    s64 channels;
    s64 from[3], to[3], kernel[3];
    Meeting axis[3];

    s64 from_pixels() const { return from[0] * from[1] * from[2]; }
    s64 to_pixels() const { return to[0] * to[1] * to[2]; }
    s64 taps() const { return kernel[0] * kernel[1] * kernel[2]; }
};

TapProduct tap_product(const ConvShape& s, bool grad_input) {
    TapProduct p{};
    p.channels = s.in_channels;
    for (int i = 0; i < 3; ++i) {
        p.from[i] = grad_input ? s.out[i] : s.in[i];
        p.to[i] = grad_input ? s.in[i] : s.out[i];
        p.kernel[i] = s.kernel[i];
        p.axis[i] = {grad_input, s.stride[i], s.padding[i], s.dilation[i], p.from[i]};
    }
    return p;
}

// A tap that meets the image: the channels of its pixel, and its weights.
struct Met {
    const s8* pixel;
    const s16* weight;
};

// Appends the taps that meet the image at destination (d, h, w) of the frame that `source` points at.
void meet(const TapProduct& p, const s64 (&at)[3], const s8* source, const s16* weights, s64 weight_stride,
          std::vector<Met>& met) {
    for (s64 t = 0; t < p.kernel[0]; ++t) {
        const s64 d = p.axis[0].source(at[0], t);
        if (d < 0) continue;
        for (s64 r = 0; r < p.kernel[1]; ++r) {
            const s64 h = p.axis[1].source(at[1], r);
            if (h < 0) continue;
            for (s64 s = 0; s < p.kernel[2]; ++s) {
                const s64 w = p.axis[2].source(at[2], s);
                if (w < 0) continue;
                met.push_back({source + ((d * p.from[1] + h) * p.from[2] + w) * p.channels,
                               weights + ((t * p.kernel[1] + r) * p.kernel[2] + s) * weight_stride});
            }
        }
    }
}

// A lane of a pixel. Two products fit int16 (2 * 127 * 127 = 32258), so taps are widened two at a time.
template <bool Whole>
void tap_vector(const std::vector<Met>& met, s64 c, s64 lanes, const f32* factors, f32* out) {
    const auto product = [&](const Met& m) {
        return mul16(Whole ? widen_bytes(m.pixel + c) : widen_some(m.pixel + c, lanes), load(m.weight + c));
    };
    OrderedSums sums;
    for (size_t i = 0; i + 1 < met.size() + met.size() % 2; i += 2) {
        V sum = product(met[i]);
        if (i + 1 < met.size()) sum = add16(sum, product(met[i + 1]));
        sums.add(sum);
    }
    if (Whole) {
        sums.write(factors + c, out + c);
    } else {
        alignas(64) f32 values[kLane];
        sums.write(factors + c, values);
        std::memcpy(out + c, values, static_cast<size_t>(lanes) * sizeof(f32));
    }
}

void tap_route(const TapProduct& p, s64 batch, const s8* source, const s8* w, Factor factor, f32* destination, int threads,
               const Epilogue* finish = nullptr) {
    const s64 C = p.channels, padded = round_up(C, kLane), taps = p.taps(), pixels = p.to_pixels();
    s16* weights = reinterpret_cast<s16*>(scratch<SharedScratch>(static_cast<size_t>(taps * padded) * sizeof(s16)));
    for (s64 t = 0; t < taps; ++t)
        for (s64 c = 0; c < padded; ++c) weights[t * padded + c] = c < C ? w[c * taps + t] : s16{0};
    parallel_parts(threads, batch * pixels, [&](s64 begin, s64 end) {
        f32* factors = reinterpret_cast<f32*>(scratch<ThreadScratch>(static_cast<size_t>(padded) * sizeof(f32)));
        std::vector<f32> own(finish ? static_cast<size_t>(C) : 0);
        std::vector<Met> met;
        met.reserve(static_cast<size_t>(taps));
        s64 sample = -1;
        for (s64 pixel = begin; pixel < end; ++pixel) {
            if (pixel / pixels != sample) {
                sample = pixel / pixels;
                fill_factors(factor, sample, C, factors);
            }
            const s64 flat = pixel % pixels;
            const s64 at[3] = {flat / (p.to[1] * p.to[2]), flat / p.to[2] % p.to[1], flat % p.to[2]};
            met.clear();
            meet(p, at, source + sample * p.from_pixels() * C, weights, padded, met);
            f32* out = finish ? own.data() : destination + pixel * C;
            s64 c = 0;
            for (; c + kLane <= C; c += kLane) tap_vector<true>(met, c, kLane, factors, out);
            if (c < C) tap_vector<false>(met, c, C - c, factors, out);
            if (finish) (*finish)(pixel, 1, 0, C, out);
        }
    });
}

}  // namespace
}  // namespace byteback
