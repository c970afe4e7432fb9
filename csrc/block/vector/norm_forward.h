// SPDX-License-Identifier: Apache-2.0
// The forward passes of norm.h, a vector of floats at a time; norm_generic.cpp says the same in plain words.
// Compiled once per path, behind its vectors.
#pragma once

#include <utility>

#include "block/vector/norm_fetch.h"
#include "block/vector/norm_rows.h"

namespace byteback::BYTEBACK_PATH {

namespace {

Forward started(Forward from, s64 row) {
    from.x = moved(from.x, from.x_kind, row * from.channels);
    from.residual = moved(from.residual, from.residual_kind, row * from.channels);
    return from;
}

template <Activation activation, class T>
struct PeakKernel {
    Forward whole, run;
    Ints peak[4];

    PeakKernel(const Forward& from, s64 together) : whole(from) {
        const Constants k({from.a, from.b}, from.channels, together);
        whole.a = k[0], whole.b = k[1];
        for (Ints& p : peak) p = all32(0);
    }

    BYTEBACK_INLINE void start(s64 row) { run = started(whole, row); }

    template <class Lanes>
    BYTEBACK_INLINE void see(int v, s64 e, Lanes lanes) {
        const Floats x = load_real(static_cast<const T*>(run.x) + e, lanes);
        const Floats value = activate<activation, true>(forward_z(run, e, x, lanes));
        peak[v] = max32(peak[v], magnitude(lanes.only(value)));
    }
    BYTEBACK_INLINE void block(s64 e) {
        for (int v = 0; v < 4; ++v) see(v, e + kLanes * v, AllLanes{});
    }
    template <class Lanes>
    BYTEBACK_INLINE void vector(s64 e, Lanes lanes) {
        see(0, e, lanes);
    }

    Report report() const {
        Tally tally;
        for (const Ints& p : peak) tally.peak = max32(tally.peak, p);
        return tally.report();
    }
};

// What is kept of x for backward; null `values`: nothing.
struct Keeper {
    void* values;
    Stored kind;
    const f32 *centre, *inverse;

    template <class Lanes>
    BYTEBACK_INLINE void keep(s64 at, s64 k, Floats x, Lanes lanes) const {
        if (kind == Stored::bf16)
            store_real(static_cast<bf16*>(values) + at, x, lanes);
        else
            keep_some(static_cast<s8*>(values) + at, {x}, centre + k, inverse + k, lanes);
    }
};

// `inverse` has room for the channels' 1 / step.
void fill_inverse(const Outcome& to, s64 channels, s64 together, f32* inverse) {
    if (!to.kept || to.kind != Stored::s8) return;
    for (s64 e = 0; e < channels * together; ++e) inverse[e] = 1.0f / to.step[e % channels];
}

// What a pass over training data reads and writes besides int8: a float residual, a mask, the floats, x kept as bytes. Known
// when compiled, so that the loop asks nothing; `anything` else asks at every vector. x, the residual and the floats are
// stored alike.
enum Wants { kResidual = 1, kMask = 2, kOutput = 4, kKept = 8, kAnything = 16 };

int wants_of(const Forward& from, const Outcome& to) {
    if (!to.values || (to.kept && to.kind != Stored::s8)) return kAnything;
    if ((from.residual && from.residual_kind != from.x_kind) || (to.output && to.output_kind != from.x_kind)) return kAnything;
    return (from.residual ? kResidual : 0) | (to.mask ? kMask : 0) | (to.output ? kOutput : 0) | (to.kept ? kKept : 0);
}

template <Activation activation, int wants, class T>
struct ApplyKernel {
    static constexpr bool anything = wants == kAnything;
    static constexpr bool signless = !anything && (wants & kOutput) == 0;  // no floats are written
    Forward whole, run;
    Outcome to;
    Clip clip;
    Tally tally;
    Keeper keeper;
    s64 at = 0, result = 0, mask_row = 0;
    bool stream, stream_kept;

    ApplyKernel(const Forward& from, const Outcome& outcome, s64 together)
        : whole(from), to(outcome), clip(outcome.clip),
          stream(to.pitch == from.channels &&
                 (to.output_kind == Stored::bf16
                      ? should_stream(static_cast<bf16*>(to.output), from.rows, from.channels, kLanes)
                      : should_stream(static_cast<f32*>(to.output), from.rows, from.channels, kLanes))),
          stream_kept(should_stream(static_cast<const s8*>(to.kept), from.channels * together, from.rows * from.channels)) {
        const Constants k({from.a, from.b, outcome.centre, nullptr}, from.channels, together);
        whole.a = k[0], whole.b = k[1];
        fill_inverse(outcome, from.channels, together, k[3]);
        keeper = {outcome.kept, outcome.kind, k[2], k[3]};
    }

    BYTEBACK_INLINE void start(s64 row) {
        run = started(whole, row);
        at = row * whole.channels;
        result = row * to.pitch;
        mask_row = row * mask_width(whole.channels);
    }

    template <class Lanes>
    BYTEBACK_INLINE Floats z_of(s64 e, Floats x, Lanes lanes) const {
        if constexpr (anything) return forward_z(run, e, x, lanes);
        const Floats z = load(run.a + e) * x + load(run.b + e);
        return wants & kResidual ? z + load_real(static_cast<const T*>(run.residual) + e, lanes) : z;
    }

    template <class Lanes>
    BYTEBACK_INLINE void write(s64 e, Floats value, Lanes lanes) const {
        if (anything ? to.output_kind == Stored::bf16 : std::is_same_v<T, bf16>)
            store_real(static_cast<bf16*>(to.output) + e, value, lanes, stream);
        else
            store_real(static_cast<f32*>(to.output) + e, value, lanes, stream);
    }

    template <int V, class Lanes>
    BYTEBACK_INLINE void some(s64 e, Lanes lanes) {
        const bool masks = anything ? to.mask != nullptr : (wants & kMask) != 0;
        const bool floats = anything ? to.output != nullptr : (wants & kOutput) != 0;
        Floats value[V], y[V], given[V];
        BlockBits mask = 0;
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const Floats x = load_real(static_cast<const T*>(run.x) + e + kLanes * v, lanes);
            const Floats z = z_of(e + kLanes * v, x, lanes);
            given[v] = x;
            value[v] = activate<activation, signless>(z);
            if (masks) mask |= lane_bits(lanes.only(passes<activation>(z))) << kLanes * v;
            if (floats) write(result + e + kLanes * v, value[v], lanes);
            if (anything && keeper.values) keeper.keep(at + e + kLanes * v, e + kLanes * v, x, lanes);
        }
        if constexpr (!anything && (wants & kKept) != 0)
            keep_some(static_cast<s8*>(keeper.values) + at + e, given, keeper.centre + e, keeper.inverse + e, lanes,
                      stream_kept);
        if (masks) std::memcpy(to.mask + mask_row + e / 8, &mask, V * lanes.mask_bytes());
        if (anything && !to.values) return;
        if constexpr (V == 1) value[0] = lanes.only(value[0]);
        tally.scale(value, clip, y);
        Ints q[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) q[v] = to_ints(y[v]);
        lanes.store_bytes(to.values + result + e, q);
    }
    BYTEBACK_INLINE void block(s64 e) {
        fetch_ahead(run.x + e);
        some<4>(e, AllLanes{});
    }
    template <class Lanes>
    BYTEBACK_INLINE void vector(s64 e, Lanes lanes) {
        some<1>(e, lanes);
    }
};

template <class T>
struct KeepKernel {
    const T* x;
    s64 channels, at = 0;
    Keeper keeper;

    KeepKernel(const T* from, const Outcome& to, s64 all_channels, s64 together) : x(from), channels(all_channels) {
        const Constants k({to.centre, nullptr}, channels, together);
        fill_inverse(to, channels, together, k[1]);
        keeper = {to.kept, to.kind, k[0], k[1]};
    }

    BYTEBACK_INLINE void start(s64 row) { at = row * channels; }
    BYTEBACK_INLINE void block(s64 e) {
        for (int v = 0; v < 4; ++v) vector(e + kLanes * v, AllLanes{});
    }
    template <class Lanes>
    BYTEBACK_INLINE void vector(s64 e, Lanes lanes) {
        keeper.keep(at + e, e, load_real(x + at + e, lanes), lanes);
    }
};

}  // namespace

f32 normalize_peak(const Forward& from, int threads) {
    auto parts = no_reports(threads);
    with_activation(from.activation, [&](auto activation) {
        with_real(from.x_kind, [&](auto real) {
            using Kernel = PeakKernel<decltype(activation)::is, decltype(real)>;
            walk_rows(
                from.rows, from.channels, threads, [&](s64 together) { return Kernel(from, together); },
                [&](int thread, const Kernel& kernel) { parts[thread] = kernel.report(); });
        });
    });
    return joined(parts).peak;
}

namespace {

template <Activation activation, int wants, class T>
Report apply(const Forward& from, const Outcome& to, int threads) {
    using Kernel = ApplyKernel<activation, wants, T>;
    auto parts = no_reports(threads);
    walk_rows(
        from.rows, from.channels, threads, [&](s64 together) { return Kernel(from, to, together); },
        [&](int thread, const Kernel& kernel) { parts[thread] = kernel.tally.report(); }, to.pitch == from.channels);
    return joined(parts);
}

template <Activation activation, class T, int... wants>
Report apply_one_of(std::integer_sequence<int, wants...>, const Forward& from, const Outcome& to, int threads) {
    using Apply = Report (*)(const Forward&, const Outcome&, int);
    constexpr Apply kernels[] = {&apply<activation, wants, T>...};
    return kernels[wants_of(from, to)](from, to, threads);
}

// The kernel for exactly these wants, for the activations of most networks.
template <Activation activation, class T>
Report apply_wanted(const Forward& from, const Outcome& to, int threads) {
    if constexpr (activation == Activation::none || activation == Activation::relu || activation == Activation::relu6)
        return apply_one_of<activation, T>(std::make_integer_sequence<int, kAnything + 1>{}, from, to, threads);
    return apply<activation, kAnything, T>(from, to, threads);
}

}  // namespace

Report normalize(const Forward& from, const Outcome& to, int threads) {
    Report seen{};
    with_activation(from.activation, [&](auto activation) {
        with_real(from.x_kind,
                  [&](auto real) { seen = apply_wanted<decltype(activation)::is, decltype(real)>(from, to, threads); });
    });
    return seen;
}

void pack_norm(s64 rows, s64 channels, const void* x, Stored kind, const Outcome& to, int threads) {
    with_real(kind, [&](auto real) {
        using Kernel = KeepKernel<decltype(real)>;
        walk_rows(
            rows, channels, threads,
            [&](s64 together) { return Kernel(static_cast<const decltype(real)*>(x), to, channels, together); },
            [](int, const Kernel&) {});
    });
}

}  // namespace byteback::BYTEBACK_PATH
