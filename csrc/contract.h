// SPDX-License-Identifier: Apache-2.0
// The numeric contract for one element: clips, rounding, noise, and the order of float64 sums. In C++ they are defined only
// here; contract_vector.h has the same for vectors. src/byteback/ops/contract has them in Python.
//
// In an anonymous namespace, so that each file compiles its own copy: the linker could use the code of one path in another.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "core/elementwise.h"

namespace byteback {
namespace {

// ---- clips and rounding ----------------------------------------------------------------------------------------------

constexpr f32 kTinyClip = 7.888609052210118e-31f;  // 2^-100: a clip below counts as 0, its integers are 0, its scale is 1

// False for NaN as well.
inline bool is_live(f32 clip) { return clip >= kTinyClip && clip < std::numeric_limits<f32>::infinity(); }

inline f32 scale_of(f32 clip) { return is_live(clip) ? clip / static_cast<f32>(kMax) : 1.0f; }
inline f32 inverse_scale(f32 clip) { return static_cast<f32>(kMax) / (is_live(clip) ? clip : 1.0f); }

// For vectors: a clip that counts as 0 has inverse 0 and bound Inf, so that its integers are 0 and nothing is saturated.
inline f32 inverse_or_zero(f32 clip) { return is_live(clip) ? inverse_scale(clip) : 0.0f; }
inline f32 bound_or_infinity(f32 clip) { return is_live(clip) ? clip : std::numeric_limits<f32>::infinity(); }

// Comparisons with NaN are false, so a NaN passes through as it is.
inline f32 clamped(f32 y) {
    constexpr f32 most = kMax;
    return y < -most ? -most : y > most ? most : y;
}

// x rounded to nearest under a clip, as a float: -0 and NaN stay what they are.
inline f32 nearest(f32 x, f32 clip) { return is_live(clip) ? std::nearbyint(clamped(x * inverse_scale(clip))) : 0.0f; }

// E[q²] of stochastic rounding: y = n + f becomes n + 1 with probability f, so it is n² + f (2n + 1), which float64 holds.
inline f64 expected_square(f64 y) {
    const f64 n = std::floor(y);
    return n * n + (y - n) * (2.0 * n + 1.0);
}

// ---- bfloat16 --------------------------------------------------------------------------------------------------------

inline bf16 to_bf16(f32 x) {
    if (std::isnan(x)) return {0x7FC0};
    u32 bits;
    std::memcpy(&bits, &x, sizeof bits);
    return {static_cast<u16>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
}

inline f32 from_bf16(bf16 x) {
    const u32 bits = static_cast<u32>(x.bits) << 16;
    f32 value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// ----------------------------------------------------------------------------------------------------------------------

// NaN if either is.
inline f32 larger(f32 a, f32 b) { return b > a || std::isnan(b) ? b : a; }

inline Report joined(const Report& a, const Report& b) {
    return {a.saturated + b.saturated, a.nonfinite + b.nonfinite, larger(a.peak, b.peak)};
}

// One int8, and its part in the report. u: the noise, or negative for rounding to nearest.
inline s8 quantized(f32 value, f32 clip, f32 u, Report& seen) {
    f32 y = clamped(value * inverse_scale(clip));
    y = u < 0.0f ? std::nearbyint(y) : std::floor(y + u);
    seen.saturated += is_live(clip) && std::fabs(value) > clip;
    seen.nonfinite += !std::isfinite(value);
    seen.peak = larger(seen.peak, std::fabs(value));
    return is_live(clip) && !std::isnan(y) ? static_cast<s8>(y) : s8{0};
}

// ---- noise (ops/contract/noise.py) -----------------------------------------------------------------------------------

constexpr u32 kPairStride = 0x9E3779B1u;
constexpr u32 kMixFirst = 0x85EBCA6Bu, kMixSecond = 0xC2B2AE35u;

inline u32 mix32(u32 h) {
    h ^= h >> 16;
    h *= kMixFirst;
    h ^= h >> 13;
    h *= kMixSecond;
    return h ^ (h >> 16);
}

// The state of a pair of channels, before k1 and mix32: h = mix32(pair_state ^ k1).
inline u32 pair_state(const Noise& noise, s64 pair) { return static_cast<u32>(pair) * kPairStride + noise.k0; }

// u of channel c in a row: (h16 + 0.5) / 65536 with the low half of the pair's h for even c, the high half for odd c.
inline f32 uniform(const Noise& noise, s64 channels, s64 row, s64 c) {
    const u32 h = mix32(pair_state(noise, row * ceil_div(channels, 2) + c / 2) ^ noise.k1);
    return (static_cast<f32>(c % 2 ? h >> 16 : h & 0xFFFFu) + 0.5f) * (1.0f / 65536.0f);
}

// ---- ordered sums (ops/backends/reference/statistics.py) -------------------------------------------------------------
// The sum of a channel adds the rows of each block of 64 in order, then the blocks as a halving tree: block i and block i +
// n/2, n a power of two. Missing rows and blocks are +0. A sum over the tensor adds the channels by the same tree.

constexpr s64 kStatisticsBlock = 64;

// One block: next() is the value of the next row. -0 is what addition leaves alone; a missing row makes +0 of a sum of -0.
template <class Next>
inline f64 sum_block(s64 rows, const Next& next) {
    f64 sum = -0.0;
    for (s64 row = 0; row < rows; ++row) sum += next();
    return rows < kStatisticsBlock ? sum + 0.0 : sum;
}

// Columns first .. last - 1 of `count` rows of `width` numbers, added as a halving tree into the first row.
inline void add_tree(f64* values, s64 count, s64 width, s64 first, s64 last) {
    s64 half = 1;
    while (half < count) half *= 2;
    for (half /= 2; half > 0; count = half, half /= 2)
        for (s64 row = 0; row < half; ++row) {
            f64* to = values + row * width;
            const f64* from = row + half < count ? to + half * width : nullptr;
            for (s64 c = first; c < last; ++c) to[c] += from ? from[c] : 0.0;
        }
}

// The tree's sum of `count` numbers, which are overwritten.
inline f64 tree_sum(f64* values, s64 count) {
    if (count == 0) return 0.0;
    s64 half = 1;
    while (half < count) half *= 2;
    for (half /= 2; half > 0; count = half, half /= 2) {
        for (s64 i = 0; i < count - half; ++i) values[i] += values[i + half];
        for (s64 i = count - half; i < half; ++i) values[i] += 0.0;
    }
    return values[0];
}

}  // namespace
}  // namespace byteback
