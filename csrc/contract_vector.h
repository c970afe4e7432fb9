// SPDX-License-Identifier: Apache-2.0
// The numeric contract (contract.h) for vectors: clips and counts, noise, and float64 sums. Compiled once per path, after its
// vectors (core/x86/vector_*.h).
#pragma once

#include <cstring>
#include <vector>

#include "contract.h"

namespace byteback {
namespace {

// ---- clips and rounding ----------------------------------------------------------------------------------------------

struct Clip {
    Floats inverse, bound;
    Ints ordinary;  // the bits of the largest magnitude that is finite and not beyond the bound

    explicit Clip(f32 clip)
        : inverse(all(inverse_or_zero(clip))), bound(all(bound_or_infinity(clip))),
          ordinary(bits_of(all(is_live(clip) ? clip : std::numeric_limits<f32>::max()))) {}
    BYTEBACK_INLINE Clip(Floats inverses, Floats bounds) : inverse(inverses), bound(bounds), ordinary(all32(0)) {}
};

BYTEBACK_INLINE Floats nan_as_zero(Floats y) { return kept(is_number(y), y); }

// y clamped and rounded to nearest; -0 and NaN stay what they are.
BYTEBACK_INLINE Floats nearest(Floats y) { return round_even(smaller(all(kMax), larger(all(-kMax), y))); }

// E[q²] of stochastic rounding; both steps are exact.
BYTEBACK_INLINE Doubles expected_square(Doubles y) {
    const Doubles n = round_down(y);
    return fused(y - n, fused(all64(2.0), n, all64(1.0)), n * n);
}

// What a thread saw, a number in each lane.
struct Tally {
    static constexpr u32 kLargest = 0x7F7FFFFF;  // the bits of the largest float
    Ints saturated = all32(0);
    Ints nonfinite = all32(0);
    Ints peak = all32(0);

    // Counts what is not finite in V vectors. Whether any of it is not.
    template <int V>
    BYTEBACK_INLINE bool see(const Floats (&v)[V]) {
        Ints most = magnitude(v[0]);
#pragma GCC unroll 4
        for (int i = 1; i < V; ++i) most = max32(most, magnitude(v[i]));
        peak = max32(peak, most);
        const Ints limit = all32(kLargest);
        if (__builtin_expect(!any_greater(most, limit), 1)) return false;
        for (int i = 0; i < V; ++i) nonfinite = counted(nonfinite, greater(magnitude(v[i]), limit));
        return true;
    }

    // v * inverse, at most 127, not yet rounded. What lies below -127 becomes -127 when it is packed.
    BYTEBACK_INLINE Floats scaled(Floats v, const Clip& clip, bool special) {
        saturated = counted(saturated, greater(absolute(v), clip.bound));
        const Floats y = v * clip.inverse;
        return smaller(__builtin_expect(special, 0) ? nan_as_zero(y) : y, all(kMax));
    }

    // V vectors by one clip: counted, and y = v * inverse, not yet rounded. As a rule all of a block lies within the clip: then
    // there is nothing to count and nothing to cut off. Whether that was so.
    template <int V>
    BYTEBACK_INLINE bool scale(const Floats (&v)[V], const Clip& clip, Floats (&y)[V]) {
        Ints most = magnitude(v[0]);
#pragma GCC unroll 4
        for (int i = 1; i < V; ++i) most = max32(most, magnitude(v[i]));
        if (__builtin_expect(!any_greater(most, clip.ordinary), 1)) {
            peak = max32(peak, most);
#pragma GCC unroll 4
            for (int i = 0; i < V; ++i) y[i] = v[i] * clip.inverse;
            return true;
        }
        const bool special = see(v);
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) y[i] = scaled(v[i], clip, special);
        return false;
    }

    // The same by a clip for each element, whose inverses and bounds lie side by side.
    template <int V>
    BYTEBACK_INLINE void scale(const Floats (&v)[V], const f32* inverse, const f32* bound, Floats (&y)[V]) {
        Ints most = all32(0);
        Mask beyond = no_lane();
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
            const Ints size = magnitude(v[i]);
            most = max32(most, size);
            beyond = either(beyond, greater(floats_of(size), load(bound + kLanes * i)));
        }
        if (__builtin_expect(!any(beyond) && !any_greater(most, all32(kLargest)), 1)) {
            peak = max32(peak, most);
#pragma GCC unroll 4
            for (int i = 0; i < V; ++i) y[i] = v[i] * load(inverse + kLanes * i);
            return;
        }
        const bool special = see(v);
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) y[i] = scaled(v[i], Clip(load(inverse + kLanes * i), load(bound + kLanes * i)), special);
    }

    Report report() const {
        s32 lanes[3][kLanes], most = 0;
        store(lanes[0], saturated), store(lanes[1], nonfinite), store(lanes[2], peak);
        Report all{0, 0, 0.0f};
        for (int i = 0; i < kLanes; ++i) {
            all.saturated += lanes[0][i];
            all.nonfinite += lanes[1][i];
            most = lanes[2][i] > most ? lanes[2][i] : most;
        }
        std::memcpy(&all.peak, &most, sizeof(f32));
        return all;
    }
};

inline Report joined(const std::vector<Report>& parts) {
    Report all{0, 0, 0.0f};
    for (const Report& part : parts) all = joined(all, part);
    return all;
}

// ---- noise -----------------------------------------------------------------------------------------------------------

BYTEBACK_INLINE Ints mix32(Ints h) {
    h = xor32(h, shr32(h, 16));
    h = mul32(h, all32(kMixFirst));
    h = xor32(h, shr32(h, 13));
    h = mul32(h, all32(kMixSecond));
    return xor32(h, shr32(h, 16));
}

// floor(y + u). `noise` holds h16 in the upper half of each lane and 0x8000, the "+ 0.5", in the lower: u * 2^32 with 17
// significant bits, exact as a float, and so is u. So the fused product and sum rounds once, as y + u does.
BYTEBACK_INLINE Ints rounded_stochastically(Floats y, Ints noise) {
    return to_ints_below(fused(noise_floats(noise), all(kNoiseUnit), y));
}

// The noise of a run of elements, of neighbouring channel pairs: two vectors of elements from a vector of hashes.
class PairNoise {
public:
    PairNoise(const Noise& noise, s64 pair) : k1_(all32(noise.k1)) {
        hash_ = add32(all32(pair_state(noise, pair)), mul32(pair_order(), all32(kPairStride)));
    }

    BYTEBACK_INLINE void next(Ints (&u)[4]) { next_two(u[0], u[1]), next_two(u[2], u[3]); }
    BYTEBACK_INLINE void next(Ints (&u)[1]) {
        Ints second;
        next_two(u[0], second);
        hash_ = sub32(hash_, all32(kLanes / 2 * kPairStride));
    }

private:
    BYTEBACK_INLINE void next_two(Ints& first, Ints& second) {
        spread_pairs(mix32(xor32(hash_, k1_)), first, second);
        hash_ = add32(hash_, all32(kLanes * kPairStride));
    }

    Ints hash_, k1_;
};

// ---- ordered sums ----------------------------------------------------------------------------------------------------

// V vectors of sums: a lane is a channel, which adds one row after the other.
template <int V>
struct Sums {
    Doubles part[2 * V];

    // -0 is what addition leaves alone.
    BYTEBACK_INLINE explicit Sums(const f64* from, bool fresh = false) {
        for (int i = 0; i < 2 * V; ++i) part[i] = fresh ? all64(-0.0) : load(from + kLanes / 2 * i);
    }
    // Missing rows of the last block are +0, which makes a sum of -0 positive.
    BYTEBACK_INLINE void save(f64* to, bool missing = false) const {
        for (int i = 0; i < 2 * V; ++i) store(to + kLanes / 2 * i, missing ? part[i] + all64(0.0) : part[i]);
    }
    BYTEBACK_INLINE void add(int v, const Wide& x) {
        part[2 * v] = part[2 * v] + x.low;
        part[2 * v + 1] = part[2 * v + 1] + x.high;
    }
    // A product of two floats is exact in float64, so that fusing rounds where the reference does.
    BYTEBACK_INLINE void add_product(int v, const Wide& a, const Wide& b) {
        part[2 * v] = fused(a.low, b.low, part[2 * v]);
        part[2 * v + 1] = fused(a.high, b.high, part[2 * v + 1]);
    }
};

}  // namespace
}  // namespace byteback
