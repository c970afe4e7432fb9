// SPDX-License-Identifier: Apache-2.0
// Two int8 copies from one reading, of floats or of the fused block's gradient; norm_generic.cpp says the same in plain words.
// Compiled once per path, behind its vectors.
#pragma once

#include "block/vector/norm_gradient.h"

namespace byteback::BYTEBACK_PATH {

namespace {

// Where a float tensor's values come from; GradientRun is the other source.
struct FloatRun {
    const f32* x;
    s64 channels, at = 0;

    BYTEBACK_INLINE void start(s64 row) { at = row * channels; }
    template <class Lanes>
    BYTEBACK_INLINE Floats value(s64 e, Lanes lanes) const {
        return lanes.load(x + at + e);
    }
};

struct Copies {
    f32 clip;
    const f32* clips;  // per channel
    Noise noise;
    s8 *by_tensor, *by_channel;
    s64 written;  // bytes of either
};

struct PairTag {};

// `both`: the copy by one clip too.
template <class Run, bool stochastic, bool both>
struct PairKernel {
    Run run;
    s64 channels;
    Clip clip;
    f32 *inverse, *bound;  // per channel
    Noise noise;
    PairNoise state;
    s8 *by_tensor, *by_channel;
    Tally tally, channel_tally;  // the second only counts what is saturated
    bool stream;

    PairKernel(const Run& from, s64 all_channels, const Copies& to, s64 together)
        : run(from), channels(all_channels), clip(to.clip), noise(to.noise), state(to.noise, 0), by_tensor(to.by_tensor),
          by_channel(to.by_channel) {
        const s64 start = channels * together;
        stream = (!both || should_stream(by_tensor, start, to.written)) && should_stream(by_channel, start, to.written);
        const s64 room = channels * together + kBlock;  // in scratch memory of its own: the run has its constants in the other
        inverse = reinterpret_cast<f32*>(scratch<PairTag>(2 * room * sizeof(f32)));
        bound = inverse + room;
        std::memset(inverse, 0, 2 * room * sizeof(f32));
        for (s64 e = 0; e < channels * together; ++e) {
            const f32 c = to.clips[e % channels];
            inverse[e] = is_live(c) ? inverse_scale(c) : 0.0f;
            bound[e] = is_live(c) ? c : std::numeric_limits<f32>::infinity();
        }
    }

    BYTEBACK_INLINE void start(s64 row) {
        run.start(row);
        if (stochastic) state = PairNoise(noise, row * ceil_div(channels, 2));
    }

    // Tally::scale for clips per channel; `finite` says that no value is NaN or Inf.
    template <int V>
    BYTEBACK_INLINE void scale_channels(s64 e, const Floats (&value)[V], bool finite, Floats (&y)[V]) {
        Mask beyond = no_lane();
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const Floats size = absolute(value[v]);
            beyond = either(beyond, greater(size, load(bound + e + kLanes * v)));
        }
        if (__builtin_expect(finite && !any(beyond), 1)) {
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) y[v] = value[v] * load(inverse + e + kLanes * v);
            return;
        }
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const Clip each(load(inverse + e + kLanes * v), load(bound + e + kLanes * v));
            y[v] = channel_tally.scaled(value[v], each, !finite);
        }
    }

    template <int V, class Lanes>
    BYTEBACK_INLINE void some(s64 e, Lanes lanes) {
        Floats value[V], y[V], y_channel[V];
        Ints u[V], q[V], q_channel[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) value[v] = lanes.only(run.value(e + kLanes * v, lanes));
        const bool finite = both ? tally.scale(value, clip, y) : !tally.see(value);
        scale_channels(e, value, finite, y_channel);
        if (stochastic) state.next(u);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            if (both) q[v] = stochastic ? rounded_stochastically(y[v], u[v]) : to_ints(y[v]);
            q_channel[v] = stochastic ? rounded_stochastically(y_channel[v], u[v]) : to_ints(y_channel[v]);
        }
        if (both) lanes.store_bytes(by_tensor + run.at + e, q, stream);
        lanes.store_bytes(by_channel + run.at + e, q_channel, stream);
    }
    BYTEBACK_INLINE void block(s64 e) { some<4>(e, AllLanes{}); }
    template <class Lanes>
    BYTEBACK_INLINE void vector(s64 e, Lanes lanes) {
        some<1>(e, lanes);
    }
};

template <class Run, class MakeRun>
void write_pair(s64 rows, s64 channels, const Copies& to, Report reports[2], int threads, const MakeRun& make_run) {
    auto first = no_reports(threads), second = no_reports(threads);
    const auto walk = [&](auto stochastic, auto both) {
        using Kernel = PairKernel<Run, decltype(stochastic)::is, decltype(both)::is>;
        walk_rows(
            rows, channels, threads, [&](s64 together) { return Kernel(make_run(together), channels, to, together); },
            [&](int thread, const Kernel& kernel) {
                first[thread] = kernel.tally.report();
                second[thread] = kernel.channel_tally.report();
            });
    };
    const Constant<true> yes;
    const Constant<false> no;
    if (to.by_tensor)
        to.noise.stochastic ? walk(yes, yes) : walk(no, yes);
    else
        to.noise.stochastic ? walk(yes, no) : walk(no, no);
    reports[0] = joined(first);
    reports[1] = {joined(second).saturated, reports[0].nonfinite, reports[0].peak};
}

}  // namespace

void quantize_pair(s64 rows, s64 channels, const f32* x, f32 clip, const f32* clips, Noise noise, s8* by_tensor, s8* by_channel,
                   Report reports[2], int threads) {
    write_pair<FloatRun>(rows, channels, {clip, clips, noise, by_tensor, by_channel, rows * channels}, reports, threads,
                         [&](s64) { return FloatRun{x, channels}; });
}

void normalize_grad_quantize_pair(const Backward& from, f32 clip, const f32* clips, Noise noise, s8* by_tensor, s8* by_channel,
                                  Report reports[2], int threads) {
    with_backward(from, [&](auto stored, auto gate) {
        using Run = GradientRun<decltype(stored)::is, decltype(gate)::is>;
        write_pair<Run>(from.rows, from.channels, {clip, clips, noise, by_tensor, by_channel, from.rows * from.channels},
                        reports, threads, [&](s64 together) { return Run(from, together); });
    });
}

}  // namespace byteback::BYTEBACK_PATH
