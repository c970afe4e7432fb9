// SPDX-License-Identifier: Apache-2.0
// The transforms of F(4x4,3x3) on vectors of channels, and the addresses that they read.
//
// winograd_products.h has the matrices. Compiled once per path, with its winograd_vector_*.h.
#pragma once

#include "conv/winograd/winograd_tile.h"

namespace byteback {
namespace {

// ---- One-dimensional transforms: out[i * to] = Σ_j matrix[i][j] * in[j * from] ----

// Bᵀ, int16. At most 10 times its input.
template <class T>
__attribute__((always_inline)) inline void input_1d(const T* in, int from, T* out, int to) {
    const T d0 = in[0], d1 = in[from], d2 = in[2 * from], d3 = in[3 * from], d4 = in[4 * from], d5 = in[5 * from];
    const T even = sub16(d4, shl16(d2, 2)), odd = sub16(d3, shl16(d1, 2));
    const T near = sub16(d4, d2), far = shl16(sub16(d3, d1), 1);
    out[0] = add16(shl16(sub16(d0, d2), 2), near);
    out[to] = add16(even, odd);
    out[2 * to] = sub16(even, odd);
    out[3 * to] = add16(near, far);
    out[4 * to] = sub16(near, far);
    out[5 * to] = sub16(sub16(d5, d3), shl16(far, 1));
}

// A, int16, for grad_output. At most 15 times its input.
template <class T>
__attribute__((always_inline)) inline void gradient_1d(const T* in, int from, T* out, int to) {
    const T d0 = in[0], d1 = in[from], d2 = in[2 * from], d3 = in[3 * from];
    const T even = add16(d0, d2), odd = add16(d1, d3);
    const T even2 = add16(d0, shl16(d2, 2)), odd2 = shl16(add16(d1, shl16(d3, 2)), 1);
    out[0] = d0;
    out[to] = add16(even, odd);
    out[2 * to] = sub16(even, odd);
    out[3 * to] = add16(even2, odd2);
    out[4 * to] = sub16(even2, odd2);
    out[5 * to] = d3;
}

// E·G', int16. Twice in a row at most 144 times its input.
__attribute__((always_inline)) inline void weight_1d(const V* in, int from, V* out, int to) {
    const V g0 = in[0], g1 = in[from], g2 = in[2 * from];
    const V outer = sub16(zero(), add16(g0, g2));
    const V outer2 = add16(g0, shl16(g2, 2)), middle2 = shl16(g1, 1);
    out[0] = mul16(g0, 6);
    out[to] = shl16(sub16(outer, g1), 2);
    out[2 * to] = shl16(add16(outer, g1), 2);
    out[3 * to] = add16(outer2, middle2);
    out[4 * to] = sub16(outer2, middle2);
    out[5 * to] = mul16(g2, 6);
}

// Aᵀ·F, modulo 2^32.
__attribute__((always_inline)) inline void output_1d(const V* in, int from, V* out, int to) {
    const V m0 = in[0], m1 = in[from], m2 = in[2 * from], m3 = in[3 * from], m4 = in[4 * from], m5 = in[5 * from];
    const V sum = add32(m1, m2), difference = sub32(m1, m2), sum2 = add32(m3, m4), difference2 = shl32(sub32(m3, m4), 1);
    out[0] = add32(add32(m0, sum), sum2);
    out[to] = add32(difference, difference2);
    out[2 * to] = add32(sum, shl32(sum2, 2));
    out[3 * to] = add32(difference, shl32(add32(difference2, m5), 2));
}

// G'ᵀ·E·F, modulo 2^32, for grad_weight.
__attribute__((always_inline)) inline void grad_weight_1d(const V* in, int from, V* out, int to) {
    const V m0 = in[0], m1 = in[from], m2 = in[2 * from], m3 = in[3 * from], m4 = in[4 * from], m5 = in[5 * from];
    const V sum = shl32(add32(m1, m2), 2), difference = shl32(sub32(m2, m1), 2), sum2 = add32(m3, m4);
    out[0] = add32(sub32(shl32(add32(shl32(m0, 1), m0), 1), sum), sum2);
    out[to] = add32(difference, shl32(sub32(m3, m4), 1));
    out[2 * to] = add32(sub32(shl32(sum2, 2), sum), shl32(add32(shl32(m5, 1), m5), 3));
}

// From 576·y modulo 2^32 to y, for |y| < 2^25: times the inverse of 9 is 64·y, which an int32 holds.
inline V divide_by_576(V v) { return sar32(mul32(v, 954437177), 6); }

// Whether a sum of products surely survives divide_by_576, when its absolute value is at most 127 * `magnitude`: |sum| < 2^25.
//   output, any weights      magnitude 9 · channels · 127: up to 231 channels, 33 532 191 < 2^25 = 33 554 432
//   output, these weights    magnitude Σ|w| of a result channel, for inputs of ±127
//   grad_weight              magnitude 16 · tiles · 127: up to 128 tiles (an even number), 33 032 192
constexpr bool chunk_is_safe(s64 magnitude) { return kMax * magnitude < (s64{1} << 25); }

// ---- Two-dimensional ones: columns first, then rows ----

// The columns of a tile of products, 6 values to 4; output_1d of each `half + 6 * i` is then row i of the outputs.
inline void output_columns(const s32* products, V half[24]) {
    for (int j = 0; j < 6; ++j) {
        V column[6];
        for (int i = 0; i < 6; ++i) column[i] = load(products + (i * 6 + j) * kPanel);
        output_1d(column, 1, half + j, 6);
    }
}

inline void grad_weight_2d(const s32* products, V out[9]) {
    V half[18];
    for (int j = 0; j < 6; ++j) {
        V column[6];
        for (int i = 0; i < 6; ++i) column[i] = load(products + (i * 6 + j) * kPanel);
        grad_weight_1d(column, 1, half + j, 6);
    }
    for (int i = 0; i < 3; ++i) grad_weight_1d(half + 6 * i, 1, out + 3 * i, 1);
}

// ---- Tiles ----

// A tensor of clips cut into tiles: tile (h, w) of a frame begins at pixel (h * 4 - pad_h, w * 4 - pad_w). Tiles are numbered
// as the result's frames are, of which a clip may have more or fewer: under time tap t frame i of the result reads frame i +
// shift + t. For images a clip is one frame.
struct Tiling {
    const s8* data;
    s64 height, width, channels;
    s64 tiles_h, tiles_w;
    s64 pad_h, pad_w;
    s64 frames;         // of a clip of `data`
    s64 result_frames;  // of a clip of the result
    s64 shift;
    s64 count;        // tiles of all clips
    const s8* zeros;  // as many as channels: what lies outside of a frame, or of a clip

    s64 per_image() const { return tiles_h * tiles_w; }
};

template <class Transform, class Read, class Emit>
__attribute__((always_inline)) inline void transform_tile(const Read& read, const Emit& emit) {
    constexpr int n = Transform::kSize;
    V half[6 * n];
    for (int j = 0; j < n; ++j) {
        V column[n];
        for (int i = 0; i < n; ++i) column[i] = read(i * n + j);
        Transform::apply_1d(column, 1, half + j, n);
    }
    for (int i = 0; i < 6; ++i) {
        V row[6];
        Transform::apply_1d(half + n * i, 1, row, 1);
        for (int j = 0; j < 6; ++j) emit(i * 6 + j, row[j]);
    }
}

}  // namespace
}  // namespace byteback
