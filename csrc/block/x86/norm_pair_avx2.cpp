// SPDX-License-Identifier: Apache-2.0
// Two int8 copies from one reading, of floats or of the fused block's gradient; norm_generic.cpp says the same in plain words.
#include <immintrin.h>

#include "core/avx2.h"
#include "block/x86/norm_gradient_avx2.h"

namespace byteback::avx2 {

namespace {

// Where a float tensor's values come from; GradientRun is the other source.
struct FloatRun {
    const f32* x;
    s64 channels, at = 0;

    BYTEBACK_INLINE void start(s64 row) { at = row * channels; }
    template <class Lanes>
    BYTEBACK_INLINE __m256 value(s64 e, Lanes lanes) const {
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
        const s64 room = channels * together + 32;  // in scratch memory of its own: the run has its constants in the other
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
    BYTEBACK_INLINE void scale_channels(s64 e, const __m256 (&value)[V], bool finite, __m256 (&y)[V]) {
        __m256 beyond = _mm256_setzero_ps();
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const __m256 size = _mm256_castsi256_ps(magnitude(value[v]));
            beyond = _mm256_or_ps(beyond, _mm256_cmp_ps(size, _mm256_loadu_ps(bound + e + 8 * v), _CMP_GT_OQ));
        }
        if (__builtin_expect(finite && _mm256_movemask_ps(beyond) == 0, 1)) {
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) y[v] = _mm256_mul_ps(value[v], _mm256_loadu_ps(inverse + e + 8 * v));
            return;
        }
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const Clip each(_mm256_loadu_ps(inverse + e + 8 * v), _mm256_loadu_ps(bound + e + 8 * v));
            y[v] = channel_tally.scaled(value[v], each, !finite);
        }
    }

    template <int V, class Lanes>
    BYTEBACK_INLINE void some(s64 e, Lanes lanes) {
        __m256 value[V], y[V], y_channel[V];
        __m256i u[V], q[V], q_channel[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) value[v] = lanes.only(run.value(e + 8 * v, lanes));
        const bool finite = both ? tally.scale(value, clip, y) : !tally.see(value);
        scale_channels(e, value, finite, y_channel);
        if (stochastic) state.next(u);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            if (both) q[v] = _mm256_cvtps_epi32(stochastic ? PairNoise::round(y[v], u[v]) : y[v]);
            q_channel[v] = _mm256_cvtps_epi32(stochastic ? PairNoise::round(y_channel[v], u[v]) : y_channel[v]);
        }
        if (both) store_bytes(by_tensor + run.at + e, q, lanes, stream);
        store_bytes(by_channel + run.at + e, q_channel, lanes, stream);
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

void quantize_pair(s64 rows, s64 channels, const f32* x, f32 clip, const f32* clips, Noise noise, s8* by_tensor,
                   s8* by_channel, Report reports[2], int threads) {
    write_pair<FloatRun>(rows, channels, {clip, clips, noise, by_tensor, by_channel, rows * channels}, reports, threads,
                         [&](s64) { return FloatRun{x, channels}; });
}

void normalize_grad_quantize_pair(const Backward& from, f32 clip, const f32* clips, Noise noise, s8* by_tensor, s8* by_channel,
                                  Report reports[2], int threads) {
    with_backward(from, [&](auto stored, auto gate) {
        using Run = GradientRun<decltype(stored)::is, decltype(gate)::is>;
        write_pair<Run>(from.rows, from.channels, {clip, clips, noise, by_tensor, by_channel, from.rows * from.channels}, reports, threads,
                        [&](s64 together) { return Run(from, together); });
    });
}

}  // namespace byteback::avx2
