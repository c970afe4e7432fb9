// SPDX-License-Identifier: Apache-2.0
// The weights of the Winograd path: from KRSC bytes to panels of transformed int16 pairs, 16 result channels at a time.
//
// Compiled once per path, with its winograd_vector_*.h.
#pragma once

#include <algorithm>
#include <cstring>

#include "conv/winograd/winograd_transform.h"

namespace byteback {
namespace {

// Weights (K,T,3,3,C) as seen by a product with `channels` summed channels and `width` result channels:
//   output      result k, summed c, tap t           grad_input  result c, summed k, taps counted from the end ("turned")
// The time taps are summed like channels: index i of the sum is channel i % stride of time tap i / stride. With several taps
// the stride is of whole vectors, because a tap's transformed inputs begin at one.
struct Weights {
    const s8* data;
    s64 channels, width;
    bool turned;
    s64 taps, stride;

    s64 depth() const { return taps * stride; }
};

inline Weights see_weights(const s8* data, s64 channels, s64 width, bool turned, s64 taps) {
    return {data, channels, width, turned, taps, taps == 1 ? channels : round_up(channels, kChannels)};
}

constexpr s64 kStaged = 9 * kPanel;  // bytes of one summed channel in a staged panel: [tap][column]

// One time tap of stage_panel.
inline void stage_tap(const Weights& w, s64 tap, s64 first, s64 columns, s8* staged) {
    if (w.turned) {
        const s8* from = w.data + (w.taps - 1 - tap) * 9 * w.width + first;
        for (s64 d = 0; d < w.channels; ++d, from += w.taps * 9 * w.width)
            for (int t = 0; t < 9; ++t)
                std::memcpy(staged + d * kStaged + (8 - t) * kPanel, from + t * w.width, static_cast<size_t>(columns));
        return;
    }
    const s64 row = w.taps * 9 * w.channels;  // bytes from one result channel to the next
    const s64 whole = columns == kPanel ? w.channels / 16 * 16 : 0;
    for (int t = 0; t < 9; ++t) {
        const s8* from = w.data + first * row + (tap * 9 + t) * w.channels;
        s8* to = staged + t * kPanel;
        for (s64 d = 0; d < whole; d += 16) transpose_bytes(from + d, row, to + d * kStaged, kStaged);
        for (s64 d = whole; d < w.channels; ++d)
            for (s64 j = 0; j < columns; ++j) to[d * kStaged + j] = from[j * row + d];
    }
}

// staged[summed][tap][column] for columns first .. first + 15. What lies past the tensor is zero; `staged` has an even number
// of summed channels.
inline void stage_panel(const Weights& w, s64 first, s8* staged) {
    const s64 columns = std::min<s64>(kPanel, w.width - first), even = round_up(w.depth(), 2);
    const bool gaps = columns < kPanel || even > w.depth() || w.stride > w.channels;
    if (gaps) std::memset(staged, 0, static_cast<size_t>(even * kStaged));
    for (s64 tap = 0; tap < w.taps; ++tap) stage_tap(w, tap, first, columns, staged + tap * w.stride * kStaged);
}

// Transformed panel: [position][pair of summed channels][column][2]. The positions are an odd number of cache lines apart, or
// the 36 stores of a transform would compete for few sets of the first-level cache.
inline s64 panel_lines(s64 depth) { return ceil_div(depth, 2) | 1; }
inline s64 panel_size(s64 depth) { return kPositions * panel_lines(depth) * 2 * kPanel; }

struct WeightTransform {
    static constexpr int kSize = 3;
    static void apply_1d(const V* in, int from, V* out, int to) { weight_1d(in, from, out, to); }
};

inline void transform_panel(const s8* staged, s64 depth, s16* panel) {
    const s64 lines = panel_lines(depth);
    for (s64 pair = 0; pair < ceil_div(depth, 2); ++pair) {
        const s8* from = staged + 2 * pair * kStaged;
        transform_pair<WeightTransform>([&](int tap) { return LoadWhole()(from + tap * kPanel); },
                                        [&](int tap) { return LoadWhole()(from + kStaged + tap * kPanel); },
                                        panel + pair * 2 * kPanel, lines * 2 * kPanel);
    }
}

// Σ|w| of each column of a staged panel over blocks of 16 summed channels: sums[block][column] <= 16 * 9 * 127 = 18 288.
inline void sum_magnitudes(const s8* staged, s64 depth, u16* sums) {
    for (s64 begin = 0; begin < depth; begin += 16, sums += kPanel)
        sum_columns(staged + begin * kStaged, (std::min(depth, begin + 16) - begin) * 9, sums);
}

// Whether the summed channels begin .. end-1 (begin a multiple of 16) may be brought back together: by their number, or by
// their weights.
inline bool range_is_safe(const u16* sums, s64 panels, s64 depth, s64 begin, s64 end) {
    if (chunk_is_safe(9 * kMax * (end - begin))) return true;
    const s64 blocks = ceil_div(depth, 16);
    for (s64 panel = 0; panel < panels; ++panel)
        for (s64 column = 0; column < kPanel; ++column) {
            s64 magnitude = 0;
            for (s64 block = begin / 16; block < ceil_div(end, 16); ++block)
                magnitude += sums[(panel * blocks + block) * kPanel + column];
            if (!chunk_is_safe(magnitude)) return false;
        }
    return true;
}

// The length of the fewest equal chunks of summed channels that are all safe. 224 channels always are, so this ends.
inline s64 safe_chunk(const u16* sums, s64 panels, s64 depth) {
    for (s64 count = 1;; ++count) {
        const s64 length = count == 1 ? depth : round_up(ceil_div(depth, count), 16);
        bool safe = true;
        for (s64 begin = 0; safe && begin < depth; begin += length)
            safe = range_is_safe(sums, panels, depth, begin, std::min(depth, begin + length));
        if (safe) return length;
    }
}

}  // namespace
}  // namespace byteback
