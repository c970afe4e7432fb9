// SPDX-License-Identifier: Apache-2.0
// One piece of a row at a time, a vector of floats at a time: what ApplyKernel of norm_forward.h does with whole tensors.
// Compiled once per path, behind its vectors.
#pragma once

#include "block/epilogue.h"
#include "block/vector/norm_rows.h"

namespace byteback::BYTEBACK_PATH {

namespace {

struct alignas(128) OwnTally {  // no two threads write to one cache line
    Tally tally;
};

struct State {
    Clip clip;
    std::vector<OwnTally> tallies;
};

template <Activation activation, int V, class Lanes>
BYTEBACK_INLINE void finish_some(const Forward& run, const Outcome& to, const Clip& clip, Tally& tally, s64 e, Lanes lanes) {
    Floats value[V], y[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
        value[v] = activate<activation>(
            forward_z(run, e + kLanes * v, lanes.load(static_cast<const f32*>(run.x) + e + kLanes * v), lanes));
        if (to.output) lanes.store(static_cast<f32*>(to.output) + e + kLanes * v, value[v]);
    }
    if (!to.values) return;
    if constexpr (V == 1) value[0] = lanes.only(value[0]);
    tally.scale(value, clip, y);
    Ints q[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) q[v] = to_ints(y[v]);
    lanes.store_bytes(to.values + e, q);
}

template <Activation activation>
void finish_row(const Epilogue& all, s64 row, s64 channel, s64 count, const f32* y) {
    State& state = *static_cast<State*>(all.state);
    Tally& shared = state.tallies[static_cast<size_t>(omp_get_thread_num())].tally;
    Tally tally = shared;  // in registers
    const s64 at = row * all.from.channels + channel;
    Forward run = all.from;
    Outcome to = all.to;
    run.x = y, run.a += channel, run.b += channel;
    run.residual = moved(run.residual, run.residual_kind, at);
    if (to.output) to.output = static_cast<f32*>(to.output) + row * to.pitch + channel;
    if (to.values) to.values += row * to.pitch + channel;
    s64 e = 0;
    for (; e + kBlock <= count; e += kBlock) finish_some<activation, 4>(run, to, state.clip, tally, e, AllLanes{});
    for (; e + kLanes <= count; e += kLanes) finish_some<activation, 1>(run, to, state.clip, tally, e, AllLanes{});
    if (e < count) finish_some<activation, 1>(run, to, state.clip, tally, e, FirstLanes(count - e));
    shared = tally;
}

template <Activation activation>
void finish_piece(const Epilogue& all, s64 row, s64 rows, s64 channel, s64 count, const f32* y) {
    for (s64 i = 0; i < rows; ++i) finish_row<activation>(all, row + i, channel, count, y + i * count);
}

}  // namespace

Report with_epilogue(const Forward& from, const Outcome& to, int threads, void (*body)(const Epilogue&, void*), void* context) {
    // Vectors are read past the last channel.
    std::vector<f32> a(static_cast<size_t>(from.channels + kLanes), 0.0f), b = a;
    std::memcpy(a.data(), from.a, static_cast<size_t>(from.channels) * sizeof(f32));
    std::memcpy(b.data(), from.b, static_cast<size_t>(from.channels) * sizeof(f32));
    State state{Clip(to.clip), std::vector<OwnTally>(static_cast<size_t>(threads > 1 ? threads : 1))};
    Epilogue epilogue{from, to, &state, false, nullptr};
    epilogue.from.a = a.data(), epilogue.from.b = b.data();
    with_activation(from.activation, [&](auto activation) { epilogue.finish = &finish_piece<decltype(activation)::is>; });
    body(epilogue, context);
    std::vector<Report> parts;
    for (const OwnTally& own : state.tallies) parts.push_back(own.tally.report());
    return joined(parts);
}

}  // namespace byteback::BYTEBACK_PATH
