// SPDX-License-Identifier: Apache-2.0
#include "conv/self_check.h"

#include <cstring>
#include <vector>

#include "conv/conv.h"

namespace byteback {
namespace {

struct Case {
    s64 batch, in, out, groups, size, kernel, stride, padding;
};

// The extremes meet on purpose: sums of 127 * 127 are what a saturating multiply would spoil.
s8 value(u32& state) {
    state = state * 1664525u + 1013904223u;
    const u32 kind = state >> 30, bits = state >> 16 & 255;
    return static_cast<s8>(kind == 0 ? 127 : kind == 1 ? -127 : static_cast<s32>(bits % 255) - 127);
}

using Product = const char* (*)(Path, const ConvShape&, const s8*, const s8*, Factor, f32*, int);

std::string differs(Path path, const ConvShape& s, const char* name, Product product, const std::vector<s8>& a,
                    const std::vector<s8>& b, s64 count) {
    const f32 one = 1.0f;
    std::vector<f32> expected(static_cast<size_t>(count)), got(static_cast<size_t>(count));
    product(Path::generic, s, a.data(), b.data(), {&one, 0, 0}, expected.data(), 1);
    const char* kernel = product(path, s, a.data(), b.data(), {&one, 0, 0}, got.data(), 1);
    if (std::memcmp(expected.data(), got.data(), expected.size() * sizeof(f32)) == 0) return "";
    return std::string(name) + " by " + kernel + " differs from the generic path";
}

std::string check_case(Path path, const Case& c) {
    const s64 out = (c.size + 2 * c.padding - c.kernel) / c.stride + 1, k = c.kernel;
    const s64 n = c.size, step = c.stride, pad = c.padding;
    const ConvShape s{c.batch,   c.in,          c.out,           c.groups,      {1, n, n},
                      {1, k, k}, {1, out, out}, {1, step, step}, {0, pad, pad}, {1, 1, 1}};
    u32 state = 1;
    std::vector<s8> x(static_cast<size_t>(s.batch * s.in_pixels() * s.in_channels));
    std::vector<s8> w(static_cast<size_t>(s.out_channels * s.taps() * s.group_in()));
    std::vector<s8> g(static_cast<size_t>(s.batch * s.out_pixels() * s.out_channels));
    for (std::vector<s8>* values : {&x, &w, &g})
        for (s8& v : *values) v = value(state);
    std::string found = differs(path, s, "output", conv_output, x, w, static_cast<s64>(g.size()));
    if (found.empty()) found = differs(path, s, "grad_input", conv_grad_input, g, w, static_cast<s64>(x.size()));
    if (found.empty()) found = differs(path, s, "grad_weight", conv_grad_weight, g, x, static_cast<s64>(w.size()));
    return found;
}

// A product of operands that are -127 and 127 throughout, whose one result sums all of them: no other path need be asked for
// it.
std::string check_deep(Path path, const ConvShape& s, const char* name, Product product, s64 depth) {
    const f32 one = 1.0f;
    f32 got = 0.0f;
    const std::vector<s8> low(static_cast<size_t>(depth), -kMax), high(static_cast<size_t>(depth), kMax);
    const char* kernel = product(path, s, low.data(), high.data(), {&one, 0, 0}, &got, 1);
    if (got == static_cast<f32>(-kMax * kMax * depth)) return "";
    return std::string(name) + " by " + kernel + " is wrong where the sum is " + std::to_string(depth) + " deep";
}

// Sums where an int32 ends. Three taps of 44 381 channels just fit (counted in whole vectors, as a kernel may, they do not);
// with one channel more they do not.
std::string check_depths(Path path) {
    const s64 C = kInt32Depth / 3, D = C + 1;
    const ConvShape fits{1, C, 1, 1, {1, 1, 3}, {1, 1, 3}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}, {1, 1, 1}};
    const ConvShape deeper{1, D, 1, 1, {1, 1, 3}, {1, 1, 3}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}, {1, 1, 1}};
    const ConvShape back{1, 1, C, 1, {1, 1, 1}, {1, 1, 3}, {1, 1, 3}, {1, 1, 1}, {0, 0, 2}, {1, 1, 1}};
    std::string found = check_deep(path, fits, "output", conv_output, 3 * C);
    if (found.empty()) found = check_deep(path, deeper, "output", conv_output, 3 * D);
    if (found.empty()) found = check_deep(path, back, "grad_input", conv_grad_input, 3 * C);
    return found;
}

}  // namespace

std::string self_check(Path path) {
    // A wide 1x1, odd sizes with a stride and padding, groups, all phases of a stride together, up to 8 and up to 16 columns,
    // what Winograd is used for, direct convolution with groups of 4 and of 7 pixels and of rows of 9, and depthwise kernels:
    // direct, scattered, with row pairs, and tap by tap.
    for (const Case& c : {Case{1, 64, 32, 1, 5, 1, 1, 0}, Case{2, 5, 19, 1, 7, 3, 2, 1}, Case{1, 12, 6, 2, 4, 2, 1, 0},
                          Case{1, 16, 48, 1, 16, 3, 2, 1}, Case{1, 9, 8, 1, 9, 1, 1, 0}, Case{2, 37, 20, 1, 6, 3, 1, 1},
                          Case{1, 6, 40, 1, 8, 5, 1, 2}, Case{1, 20, 21, 1, 7, 5, 1, 2}, Case{2, 20, 6, 1, 17, 3, 2, 1},
                          Case{1, 32, 32, 32, 9, 3, 1, 1}, Case{1, 64, 64, 64, 9, 3, 2, 1}, Case{2, 32, 32, 32, 9, 5, 1, 2},
                          Case{1, 32, 32, 32, 7, 4, 2, 1}}) {
        const std::string found = check_case(path, c);
        if (!found.empty()) return found;
    }
    return check_depths(path);
}

}  // namespace byteback
