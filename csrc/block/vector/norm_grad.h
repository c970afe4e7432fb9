// SPDX-License-Identifier: Apache-2.0
// The gradient of the fused block, written as floats or as int8; norm_generic.cpp says the same in plain words.
// Compiled once per path, behind its vectors.
#pragma once

#include "block/vector/norm_fetch.h"
#include "block/vector/norm_gradient.h"

namespace byteback::BYTEBACK_PATH {

namespace {

// The block of a run that begins at e: what lies kFetchAhead behind it.
template <Stored stored, Gate gate>
BYTEBACK_INLINE void fetch_ahead(const GradientRun<stored, gate>& run, s64 e) {
    fetch_stored_ahead(run.from.g, run.from.g_kind, run.at + e);
    fetch_kept_ahead<stored>(run.from.x, run.at + e);
}

template <Stored stored, Gate gate>
struct FloatKernel {
    GradientRun<stored, gate> run;
    f32* result;
    bool stream;

    BYTEBACK_INLINE void start(s64 row) { run.start(row); }
    BYTEBACK_INLINE void block(s64 e) {
        fetch_ahead(run, e);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) vector(e + kLanes * v, AllLanes{});
    }
    template <class Lanes>
    BYTEBACK_INLINE void vector(s64 e, Lanes lanes) {
        lanes.store(result + run.at + e, run.value(e, lanes), stream);
    }
};

template <Stored stored, Gate gate, bool stochastic>
struct ByteKernel {
    GradientRun<stored, gate> run;
    Clip clip;
    Noise noise;
    s8* result;
    PairNoise state;
    Tally tally;
    bool stream;

    ByteKernel(const Backward& from, f32 bound, Noise n, s8* values, s64 together)
        : run(from, together), clip(bound), noise(n), result(values), state(n, 0),
          stream(should_stream(values, from.channels * together, from.rows * from.channels)) {}

    BYTEBACK_INLINE void start(s64 row) {
        run.start(row);
        if (stochastic) state = PairNoise(noise, row * ceil_div(run.from.channels, 2));
    }

    template <int V, class Lanes>
    BYTEBACK_INLINE void some(s64 e, Lanes lanes) {
        Floats value[V], y[V];
        Ints u[V], q[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) value[v] = lanes.only(run.value(e + kLanes * v, lanes));
        tally.scale(value, clip, y);
        if (stochastic) state.next(u);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) q[v] = stochastic ? rounded_stochastically(y[v], u[v]) : to_ints(y[v]);  // half to even
        lanes.store_bytes(result + run.at + e, q, stream);
    }
    BYTEBACK_INLINE void block(s64 e) {
        fetch_ahead(run, e);
        some<4>(e, AllLanes{});
    }
    template <class Lanes>
    BYTEBACK_INLINE void vector(s64 e, Lanes lanes) {
        some<1>(e, lanes);
    }
};

}  // namespace

void normalize_grad(const Backward& from, f32* dx, int threads) {
    const bool stream = should_stream(dx, from.rows, from.channels, kLanes);
    with_backward(from, [&](auto stored, auto gate) {
        using Kernel = FloatKernel<decltype(stored)::is, decltype(gate)::is>;
        walk_rows(
            from.rows, from.channels, threads, [&](s64 together) { return Kernel{{from, together}, dx, stream}; },
            [](int, const Kernel&) {});
    });
}

Report normalize_grad_quantize(const Backward& from, f32 clip, Noise noise, s8* values, int threads) {
    auto parts = no_reports(threads);
    with_backward(from, [&](auto stored, auto gate) {
        const auto walk = [&](auto stochastic) {
            using Kernel = ByteKernel<decltype(stored)::is, decltype(gate)::is, decltype(stochastic)::is>;
            walk_rows(
                from.rows, from.channels, threads, [&](s64 together) { return Kernel(from, clip, noise, values, together); },
                [&](int thread, const Kernel& kernel) { parts[thread] = kernel.tally.report(); });
        };
        noise.stochastic ? walk(Constant<true>{}) : walk(Constant<false>{});
    });
    return joined(parts);
}

}  // namespace byteback::BYTEBACK_PATH
