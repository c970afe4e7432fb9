// SPDX-License-Identifier: Apache-2.0
// Structs that Python passes besides single addresses. bindings_structs.cpp binds them as classes with named fields. Structs
// that describe a shape are created once per shape; the others contain the tensors of one call. An address of 0 means that
// there is no tensor. Types of the kernels (ConvShape, Rows, Windows, Pixels, RoiShape) are bound directly.
#pragma once

#include "bindings/address.h"
#include "block/norm.h"
#include "core/elementwise.h"
#include "core/types.h"
#include "elementwise/rows.h"

namespace byteback {

// Two int8 operands and their scales. b_scale is 0 where a_scale holds the whole factor, factor[i * row + j * column]; else
// both are single scales, whose product it is: two numbers are not worth a tensor operation of the caller's.
struct Operands {
    Address a, b, a_scale, b_scale;
    s64 row, column;
};

// A forward pass of the block, for any tensors of this shape.
struct ForwardPass {
    s64 rows, channels;
    Activation activation;
    bool floor;          // the activation cuts at 0,
    f32 ceiling;         // and here
    bool peak_is_known;  // the extremes of a channel tell the largest value of the result, no reading is needed
    Stored kept;         // how x is stored for backward
    s64 pitch;           // elements from one row of the results to the next
    Stored x = Stored::f32, residual = Stored::f32, output = Stored::f32;  // how they are stored; a residual with a scale is s8
};

// The tensors of a norm that uses its batch: what is read (the running statistics are written, too), and what is written.
struct BatchGiven {
    Address x, gamma, beta, bias, running_mean, running_var, residual, residual_scale;
    f64 eps, momentum;
};

struct BatchMade {
    Address a, b, mean, invstd, peak, values, scale, counts, output, mask, kept, step, centre;
};

namespace {

inline Noise noise_of(Address key) {
    const s64* words = at<const s64>(key);
    return {key != 0, key ? static_cast<u32>(words[0]) : 0, key ? static_cast<u32>(words[1]) : 0};
}

inline void write_scales(const f32* clips, s64 count, f32* scales) {
    for (s64 i = 0; i < count; ++i) scales[i] = is_live(clips[i]) ? clips[i] / static_cast<f32>(kMax) : 1.0f;
}

inline void write_counts(const Report& report, Address counts) {
    at<s64>(counts)[0] = report.saturated;
    at<s64>(counts)[1] = report.nonfinite;
}

inline Forward forward_of(const ForwardPass& pass, Address x, Address a, Address b, Address residual, Address scale) {
    return {pass.rows,
            pass.channels,
            at<const void>(x),
            at<const f32>(a),
            at<const f32>(b),
            at<const void>(residual),
            scale ? *at<const f32>(scale) : 0.0f,
            pass.activation,
            pass.x,
            scale ? Stored::s8 : pass.residual};
}

// What a product's integers are multiplied by. The Factor points into this object.
class GivenFactor {
public:
    explicit GivenFactor(const Operands& of)
        : single_(of.b_scale ? *at<const f32>(of.a_scale) * *at<const f32>(of.b_scale) : 0.0f),
          factor_{of.b_scale ? &single_ : at<const f32>(of.a_scale), of.row, of.column} {}
    GivenFactor(const GivenFactor&) = delete;
    GivenFactor& operator=(const GivenFactor&) = delete;
    const Factor& get() const { return factor_; }

private:
    f32 single_;
    Factor factor_;
};

}  // namespace

}  // namespace byteback
