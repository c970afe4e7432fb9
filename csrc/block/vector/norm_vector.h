// SPDX-License-Identifier: Apache-2.0
// One vector of the fused block's passes (norm.h): activations, gates, and how x was kept. Compiled once per path, behind its
// vectors. Only for the other files of this folder.
#pragma once

#include <type_traits>

#include "block/norm.h"
#include "contract_vector.h"
#include "elementwise/rows.h"

namespace byteback::BYTEBACK_PATH {

namespace {

constexpr s64 kLineBytes = 64, kLineFloats = 16;  // of a cache line

// Whether a float result is so large that no cache would hold it until it is read again; `whole` floats are written together.
template <class T>
bool should_stream(const T* to, s64 rows, s64 channels, s64 whole) {
    constexpr s64 kLarge = 24 << 20;
    const uintptr_t address = reinterpret_cast<uintptr_t>(to);
    return to && channels % whole == 0 && address % (whole * sizeof(T)) == 0 &&
           rows * channels * static_cast<s64>(sizeof(T)) > kLarge;
}

// The same for floats of either kind; whole lines are written together.
inline bool should_stream(const void* to, Stored kind, s64 rows, s64 channels) {
    if (kind == Stored::bf16) return should_stream(static_cast<const bf16*>(to), rows, channels, kLineBytes / 2);
    return should_stream(static_cast<const f32*>(to), rows, channels, kLineFloats);
}

// The same for int8 results, of which `written` bytes are made and which are written in blocks.
inline bool should_stream(const s8* to, s64 start, s64 written) {
    constexpr s64 kLarge = 12 << 20;
    return reinterpret_cast<uintptr_t>(to) % kBlock == 0 && start % kBlock == 0 && written > kLarge;
}

// ---- activations and gates -------------------------------------------------------------------------------------------

BYTEBACK_INLINE Floats power_of_two(Ints n) { return floats_of(shl32(add32(n, all32(127)), 23)); }

// norm.h says how. A NaN stays one to the end.
BYTEBACK_INLINE Floats exponential(Floats t) {
    t = smaller(all(kExpHighest), larger(all(kExpLowest), t));
    const Floats n = round_even(t * all(kLog2E));
    const Floats r = (t - n * all(kLn2High)) - n * all(kLn2Low);
    const Floats square = r * r;
    const Floats upper = all(kExp5) * r + all(kExp4);
    const Floats lower = all(kExp3) * r + all(kExp2);
    const Floats tail = upper * square + lower;
    const Floats sum = (tail * square + r) + all(1.0f);
    return sum * power_of_two(to_ints(n));
}

BYTEBACK_INLINE Floats one_plus_exp_of_minus(Floats z) { return all(1.0f) + exponential(negated(z)); }

// A NaN stays one; -0 becomes +0.
BYTEBACK_INLINE Floats above_zero(Floats z) { return dropped(at_most(z, all(0.0f)), z); }
BYTEBACK_INLINE Floats below_six(Floats z) { return smaller(all(6.0f), z); }

// What gelu and its derivative are made of (norm.h). A NaN stays one.
struct NormalTail {
    Floats x, e, m;

    BYTEBACK_INLINE explicit NormalTail(Floats z)
        : x(smaller(all(kGeluEnd), absolute(z))), e(exponential((x * x) * all(-0.5f))), m(all(kGelu6)) {
        const Floats t = all(1.0f) / (all(1.0f) + all(kGeluStretch) * x);
        m = m * t + all(kGelu5);
        m = m * t + all(kGelu4);
        m = m * t + all(kGelu3);
        m = m * t + all(kGelu2);
        m = (m * t + all(kGelu1)) * t;
    }
};

BYTEBACK_INLINE Floats gelu(Floats z) {
    const NormalTail tail(z);
    return above_zero(z) - tail.x * (tail.e * tail.m);
}

BYTEBACK_INLINE Floats gelu_slope(Floats z) {
    const NormalTail tail(z);
    const Floats u = tail.e * (tail.m - all(kGeluDensity) * tail.x);
    return chosen(less(z, all(0.0f)), u, all(1.0f) - u);
}

// `signless`: a zero may have any sign, as where only integers or magnitudes are made of it.
template <Activation activation, bool signless = false>
BYTEBACK_INLINE Floats activate(Floats z) {
    if constexpr (activation == Activation::relu) return signless ? larger(all(0.0f), z) : above_zero(z);
    if constexpr (activation == Activation::relu6) return below_six(signless ? larger(all(0.0f), z) : above_zero(z));
    if constexpr (activation == Activation::hardswish) return (z * below_six(above_zero(z + all(3.0f)))) / all(6.0f);
    if constexpr (activation == Activation::silu) return z / one_plus_exp_of_minus(z);
    if constexpr (activation == Activation::gelu) return gelu(z);
    return z;
}

BYTEBACK_INLINE Mask between_zero_and_six(Floats z) { return both(greater(z, all(0.0f)), less(z, all(6.0f))); }

// The lanes whose gradient passes.
template <Activation activation>
BYTEBACK_INLINE Mask passes(Floats z) {
    if constexpr (activation == Activation::relu) return greater(z, all(0.0f));
    if constexpr (activation == Activation::relu6) return between_zero_and_six(z);
    return every_lane();
}

template <Gate gate>
BYTEBACK_INLINE Floats slope(Floats z) {
    if constexpr (gate == Gate::hardswish) {
        const Floats line = z / all(3.0f) + all(0.5f);
        const Floats upper = chosen(at_most(z, all(3.0f)), line, all(1.0f));
        return dropped(less(z, all(-3.0f)), upper);
    }
    if constexpr (gate == Gate::gelu) return gelu_slope(z);
    const Floats s = all(1.0f) / one_plus_exp_of_minus(z);
    return s * (all(1.0f) + z * (all(1.0f) - s));
}

// gm. `k` is where the channels' a and b lie, `m` the mask's byte.
template <Gate gate, class Lanes>
BYTEBACK_INLINE Floats gated(Floats g, Floats x, const Backward& from, s64 k, s64 m, Lanes lanes) {
    if constexpr (gate == Gate::open) return g;
    if constexpr (gate == Gate::mask) return kept(lanes.mask(from.mask + m), g);
    const Floats z = load(from.a + k) * x + load(from.b + k);
    if constexpr (gate == Gate::relu) return kept(passes<Activation::relu>(z), g);
    if constexpr (gate == Gate::relu6) return kept(between_zero_and_six(z), g);
    return g * slope<gate>(z);
}

// ---- floats as they are stored -----------------------------------------------------------------------------------------

template <class Lanes>
BYTEBACK_INLINE Floats load_real(const f32* p, Lanes lanes) {
    return lanes.load(p);
}
template <class Lanes>
BYTEBACK_INLINE Floats load_real(const bf16* p, Lanes lanes) {
    return floats_of(shl32(lanes.ints(&p->bits), 16));
}

// By integers: the instruction for this takes subnormal numbers for zeros.
BYTEBACK_INLINE Ints words_of(Floats x) {
    const Ints bits = bits_of(x), odd = and32(shr32(bits, 16), all32(1));
    const Ints words = shr32(add32(add32(bits, all32(0x7FFF)), odd), 16);
    return chosen(is_nan(x), all32(0x7FC0), words);
}

template <class Lanes>
BYTEBACK_INLINE void store_real(f32* p, Floats x, Lanes lanes, bool stream = false) {
    lanes.store(p, x, stream);
}
template <class Lanes>
BYTEBACK_INLINE void store_real(bf16* p, Floats x, Lanes lanes, bool stream = false) {
    lanes.store_words(&p->bits, words_of(x), stream);
}

// Floats of either kind. Asked for each vector, so that a kernel is compiled once for both.
template <class Lanes>
BYTEBACK_INLINE Floats load_stored(const void* from, Stored kind, s64 at, Lanes lanes) {
    if (kind == Stored::bf16) return load_real(static_cast<const bf16*>(from) + at, lanes);
    return lanes.load(static_cast<const f32*>(from) + at);
}
template <class Lanes>
BYTEBACK_INLINE void store_stored(void* to, Stored kind, s64 at, Floats x, Lanes lanes, bool stream) {
    if (kind == Stored::bf16) return store_real(static_cast<bf16*>(to) + at, x, lanes, stream);
    lanes.store(static_cast<f32*>(to) + at, x, stream);
}

// x, which is at p, in float64.
template <class Lanes>
BYTEBACK_INLINE Wide wide_real(const f32* p, Floats x, Lanes lanes) {
    return lanes.wide(p, x);
}
template <class Lanes>
BYTEBACK_INLINE Wide wide_real(const bf16*, Floats x, Lanes) {
    return widen(x);
}

// Floats, written as they are or as bfloat16.
inline void copy_reals(f32* to, const f32* from, s64 count) { std::memcpy(to, from, static_cast<size_t>(count) * sizeof(f32)); }
inline void copy_reals(bf16* to, const f32* from, s64 count) {
    s64 e = 0;
    for (; e + kLanes <= count; e += kLanes) store_real(to + e, load(from + e), AllLanes{});
    const FirstLanes rest(count - e);
    if (e < count) store_real(to + e, rest.load(from + e), rest);
}

// x as it will be read when it was stored as a T.
template <class T>
BYTEBACK_INLINE Floats rounded_to(Floats x) {
    if constexpr (std::is_same_v<T, bf16>) return floats_of(shl32(words_of(x), 16));
    return x;
}

// ---- how x was kept --------------------------------------------------------------------------------------------------

template <Stored stored, class Lanes>
BYTEBACK_INLINE Floats kept_value(const Kept& x, s64 at, s64 k, Lanes lanes) {
    if constexpr (stored == Stored::f32) return lanes.load(static_cast<const f32*>(x.values) + at);
    if constexpr (stored == Stored::bf16) return load_real(static_cast<const bf16*>(x.values) + at, lanes);
    const Floats q = to_floats(lanes.ints(static_cast<const s8*>(x.values) + at));
    return q * load(x.step + k) + load(x.centre + k);
}

// x as int8 around its centre, V vectors; as a rule none of it is NaN.
template <int V, class Lanes>
BYTEBACK_INLINE void keep_some(s8* to, const Floats (&x)[V], const f32* centre, const f32* inverse, Lanes lanes,
                               bool stream = false) {
    Floats y[V];
    Mask odd = no_lane();
    Ints q[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
        y[v] = (x[v] - load(centre + kLanes * v)) * load(inverse + kLanes * v);
        if (v % 2 || v == V - 1) odd = either(odd, is_nan(y[v], y[v ? v - 1 : 0]));
    }
    const bool special = any(odd);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
        const Floats number = __builtin_expect(special, 0) ? nan_as_zero(y[v]) : y[v];
        q[v] = to_ints(smaller(number, all(kMax)));
    }
    lanes.store_bytes(to, q, stream);
}

// ---- from a number to a template argument ----------------------------------------------------------------------------

template <auto value>
struct Constant {
    static constexpr auto is = value;
};

// body(the type, as the first parameter of a lambda), for f32 and bf16
template <class Body>
void with_real(Stored kind, const Body& body) {
    kind == Stored::bf16 ? body(bf16{}) : body(f32{});
}

template <class Body>
void with_activation(Activation activation, const Body& body) {
    switch (activation) {
        case Activation::none: return body(Constant<Activation::none>{});
        case Activation::relu: return body(Constant<Activation::relu>{});
        case Activation::relu6: return body(Constant<Activation::relu6>{});
        case Activation::hardswish: return body(Constant<Activation::hardswish>{});
        case Activation::silu: return body(Constant<Activation::silu>{});
        case Activation::gelu: return body(Constant<Activation::gelu>{});
    }
}

template <Stored stored, class Body>
void with_gate(Gate gate, const Body& body) {
    const Constant<stored> kind;
    switch (gate) {
        case Gate::open: return body(kind, Constant<Gate::open>{});
        case Gate::mask: return body(kind, Constant<Gate::mask>{});
        case Gate::relu: return body(kind, Constant<Gate::relu>{});
        case Gate::relu6: return body(kind, Constant<Gate::relu6>{});
        case Gate::hardswish: return body(kind, Constant<Gate::hardswish>{});
        case Gate::silu: return body(kind, Constant<Gate::silu>{});
        case Gate::gelu: return body(kind, Constant<Gate::gelu>{});
    }
}

// body(how x was kept, gate)
template <class Body>
void with_backward(const Backward& from, const Body& body) {
    switch (from.x.kind) {
        case Stored::f32: return with_gate<Stored::f32>(from.gate, body);
        case Stored::bf16: return with_gate<Stored::bf16>(from.gate, body);
        case Stored::s8: return with_gate<Stored::s8>(from.gate, body);
    }
}

}  // namespace

}  // namespace byteback::BYTEBACK_PATH
