// SPDX-License-Identifier: Apache-2.0
// grad_weight by Winograd: products of transformed inputs and gradients, summed over up to 128 tiles, then transformed back and
// added up.
//
// A thread works on a part of the tiles and a part of the input channels. It transforms the gradients of a chunk of tiles, then
// the inputs, 32 channels at a time, and multiplies each 16 of them with each 16 of the gradients. Both are stored as panels
// [position][pair of tiles][channel][2].
//
// winograd_products.h has the algorithm. Compiled once per path.
#pragma once

#include <algorithm>

#include "core/parallel.h"
#include "conv/winograd/winograd_memory.h"
#include "conv/winograd/winograd_strip.h"
#include "conv/winograd/winograd_weights.h"

namespace byteback {
namespace {

constexpr s64 kChunkTiles = 128;
static_assert(chunk_is_safe(16 * kMax * kChunkTiles), "a chunk's sums must survive divide_by_576");
constexpr s64 kPartChunks = kInt32Depth / (16 * kChunkTiles);  // 65 chunks surely add up within int32
constexpr s64 kGradientPanels = 32;                            // that are held at a time, in the third-level cache
constexpr s64 kStreamedGradient = 1 << 20;                     // bytes of dw

// dw[k, r, s, c] = Σ_{n, i, h, w} g[n, i + shift_g, h, w, k] · x[n, i + shift_x, h + r - pad_h, w + s - pad_w, c]: one time
// tap, for the frames i in which both exist.
struct GradWeight {
    Tiling inputs, gradients;
    Factor factor;
    f32* dw;
    s64 dw_row;      // values from one k to the next
    bool streaming;  // past the caches: dw is large and made of whole cache lines

    s64 in_channels() const { return inputs.channels; }
    s64 out_channels() const { return gradients.channels; }
};

struct GradWeightPlan {
    s64 chunks, chunk_tiles;
    s64 tile_parts;     // each has its own sums, of int32
    s64 channel_parts;  // each transforms all gradients of its tiles
    s64 row;            // input channels, rounded up: sums are [part][k][tap][row]

    s64 part_size(s64 out_channels) const { return out_channels * 9 * row; }
};

// Parts such that the busiest thread has the least to do. Among equals: tiles apart while the sums are small (no work is done
// twice), else channels apart (no sums to add up).
GradWeightPlan plan_grad_weight(const GradWeight& g, int threads) {
    GradWeightPlan p{};
    p.row = round_up(g.in_channels(), kPanel);
    p.chunks = ceil_div(g.inputs.count, kChunkTiles);
    if (p.chunks == 0) return p;
    p.chunk_tiles = round_up(ceil_div(g.inputs.count, p.chunks), 2);
    const s64 panels = p.row / kPanel, least = ceil_div(p.chunks, kPartChunks);
    const bool prefer_tiles = p.part_size(g.out_channels()) * 4 <= 1 << 20;
    s64 best = -1;
    for (s64 split = 1; split <= threads; ++split) {
        const s64 channel_parts = std::min(prefer_tiles ? split : threads / split, panels);
        const s64 tile_parts = std::clamp<s64>(threads / channel_parts, least, std::max(least, p.chunks));
        const s64 rounds = ceil_div(tile_parts * channel_parts, threads);
        const s64 cost = rounds * ceil_div(p.chunks, tile_parts) * ceil_div(panels, channel_parts);
        if (best >= 0 && cost >= best) continue;
        best = cost;
        p.tile_parts = tile_parts;
        p.channel_parts = channel_parts;
    }
    return p;
}

struct GradWeightThread {
    s16* gradients;  // panels of a chunk
    s16* inputs;
    s32* products;  // [panel of c][k][position][c], 16 of each
    Half* strip;    // see Strip

    void reserve(Arena& arena, const GradWeight& g, const GradWeightPlan& p) {
        const s64 size = panel_size(p.chunk_tiles);
        arena.reserve(gradients, std::min(kGradientPanels, ceil_div(g.out_channels(), kPanel)) * size);
        arena.reserve(inputs, kInputPanels * size);
        arena.reserve(products, kInputPanels * kPanel * kTile);
        arena.reserve(strip, Strip<InputTransform>::size());
    }
};

// Channels begin .. end-1 (begin a multiple of 16) of tiles first .. last-1 as panels; an odd last tile, which is the tensor's,
// is paired with zeros.
template <class Transform>
void transform_pairs(const Tiling& t, s64 first, s64 last, s64 begin, s64 end, s64 chunk_tiles, Half* strip, s16* panels) {
    const s64 lines = panel_lines(chunk_tiles), size = panel_size(chunk_tiles);
    for (s64 tile = first; tile < last; tile += kStripTiles) {
        const s64 pairs = ceil_div(std::min(kStripTiles, last - tile), 2);
        const Strip<Transform> tiles(t, tile, tile + 2 * pairs, 0);
        for_panels(begin, end, t.channels, [&](s64 channel, const auto& load) {
            tiles.transform_columns(channel, [&](const s8* pixel) { return widen_to_pair(load(pixel)); }, strip);
            s16* to = panels + (channel - begin) / kPanel * size + (tile - first) / 2 * 2 * kPanel;
            for (s64 pair = 0; pair < pairs; ++pair, to += 2 * kPanel)
                for (int i = 0; i < 6; ++i) {
                    Half even[6], odd[6];
                    tiles.transform_row(strip, 2 * pair, i, even);
                    tiles.transform_row(strip, 2 * pair + 1, i, odd);
                    for (int j = 0; j < 6; ++j) store_pair(to + (i * 6 + j) * lines * 2 * kPanel, even[j], odd[j]);
                }
        });
    }
}

// Row k, 9 taps, 16 input channels of dw.
void store_taps(const GradWeight& g, s64 k, s64 c, const V (&values)[kVectors][9]) {
    const s64 columns = g.in_channels() - c;
    alignas(64) f32 factors[kPanel];
    read_factors(g.factor, k, c, columns, factors);
    Floats scales[kVectors];
    for (int i = 0; i < kVectors; ++i) scales[i] = load_floats(factors + i * kLanes);
    for (int tap = 0; tap < 9; ++tap) {
        f32* to = g.dw + k * g.dw_row + tap * g.in_channels() + c;
        for (int i = 0; i < kVectors; ++i) {
            const Floats v = scale(values[i][tap], scales[i]);
            if (g.streaming)
                stream_floats(to + i * kLanes, v);
            else
                store_floats(to + i * kLanes, v, columns - i * kLanes);
        }
    }
}

// Products of 16 x 16 channels to sums, or, when the only part is through, to floats.
void finish_panel(const GradWeight& g, const GradWeightPlan& p, const s32* products, s64 k, s64 c, s32* sums, bool first,
                  bool done) {
    const s64 rows = std::min<s64>(kPanel, g.out_channels() - k);
    for (s64 i = 0; i < rows; ++i) {
        V values[kVectors][9];
        for (int j = 0; j < kVectors; ++j) {
            grad_weight_2d(products + i * kTile + j * kLanes, values[j]);
            for (int tap = 0; tap < 9; ++tap) {
                s32* sum = sums + ((k + i) * 9 + tap) * p.row + c + j * kLanes;
                V v = divide_by_576(values[j][tap]);
                if (!first) v = add32(v, load(sum));
                if (!done) store(sum, v);
                values[j][tap] = v;
            }
        }
        if (done) store_taps(g, k + i, c, values);
    }
}

// 16 gradient channels and `panels` times 16 input channels of a chunk. While it multiplies it fetches the operands of the next
// position, first of all the gradients, which come from the third-level cache, and the sums that finish_panel will add to: 144
// rows of a cache line per panel, `stride` bytes apart.
void multiply_panels(const s16* gradients, const s16* inputs, s64 rows, s64 panels, s64 pairs, s64 lines, s64 size,
                     s32* products, const char* sums, s64 stride) {
    for (int position = 0; position < kPositions; ++position, gradients += lines * 2 * kPanel, inputs += lines * 2 * kPanel) {
        for (int i = 0; i < 4; ++i, sums += stride)
            for (s64 panel = 0; panel < panels; ++panel) __builtin_prefetch(sums + panel * 64);
        const char* a = reinterpret_cast<const char*>(gradients);
        const Ahead ahead[3] = {{a + lines * 64, 64}, {reinterpret_cast<const char*>(inputs) + lines * 64, 64}, {a, 0}};
        for (s64 row = 0; row < rows; row += kRows)
            multiply(
                std::min<s64>(kRows, rows - row), panels,
                {a + 4 * row, 4, 4 * kPanel, inputs, size, pairs, products + row * kTile + position * kPanel, kPanel * kTile},
                ahead[row / kRows]);
    }
}

// One chunk of tiles, gradient channels k_begin .. k_end-1, input channels c_begin .. c_end-1.
void grad_weight_chunk(const GradWeight& g, const GradWeightPlan& p, const GradWeightThread& own, s64 chunk, s64 k_begin,
                       s64 k_end, s64 c_begin, s64 c_end, s32* sums, bool first, bool done) {
    const s64 tile = chunk * p.chunk_tiles, last = std::min(g.inputs.count, tile + p.chunk_tiles);
    const s64 pairs = ceil_div(last - tile, 2);
    const s64 lines = panel_lines(p.chunk_tiles), size = panel_size(p.chunk_tiles);
    transform_pairs<GradientTransform>(g.gradients, tile, last, k_begin, k_end, p.chunk_tiles, own.strip, own.gradients);
    for (s64 block = c_begin; block < c_end; block += kInputPanels * kPanel) {
        const s64 block_end = std::min(c_end, block + kInputPanels * kPanel);
        transform_pairs<InputTransform>(g.inputs, tile, last, block, block_end, p.chunk_tiles, own.strip, own.inputs);
        const s64 panels = ceil_div(block_end - block, kPanel);
        for (s64 k = k_begin; k < k_end; k += kPanel) {
            const s16* a = own.gradients + (k - k_begin) / kPanel * size;
            const s64 rows = std::min<s64>(kPanel, k_end - k);
            const bool adds = !(first && done);  // else the sums are never touched
            multiply_panels(a, own.inputs, rows, panels, pairs, lines, size, own.products,
                            reinterpret_cast<const char*>(sums + k * 9 * p.row + block), adds ? 4 * p.row : 0);
            for (s64 panel = 0; panel < panels; ++panel)
                finish_panel(g, p, own.products + panel * kPanel * kTile, k, block + panel * kPanel, sums, first, done);
        }
    }
}

void grad_weight_part(const GradWeight& g, const GradWeightPlan& p, s64 tile_part, s64 channel_part, s32* sums) {
    Arena arena;
    GradWeightThread own{};
    own.reserve(arena, g, p);
    arena.begin(scratch<ThreadTag>(static_cast<size_t>(arena.bytes())));
    own.reserve(arena, g, p);
    const s64 panels = p.row / kPanel, block = kGradientPanels * kPanel;
    const s64 c_begin = panels * channel_part / p.channel_parts * kPanel;
    const s64 c_end = std::min(g.in_channels(), panels * (channel_part + 1) / p.channel_parts * kPanel);
    const s64 begin = p.chunks * tile_part / p.tile_parts, end = p.chunks * (tile_part + 1) / p.tile_parts;
    for (s64 k = 0; k < g.out_channels(); k += block)
        for (s64 chunk = begin; chunk < end; ++chunk)
            grad_weight_chunk(g, p, own, chunk, k, std::min(g.out_channels(), k + block), c_begin, c_end, sums, chunk == begin,
                              p.tile_parts == 1 && chunk + 1 == end);
    end_streams();
}

// dw from the sums of all parts, which together may need 64 bits.
void add_parts(const GradWeight& g, const GradWeightPlan& p, const s32* sums, int threads) {
    parallel_for(threads, g.out_channels() * 9, [&](s64 row) {
        for (s64 c = 0; c < g.in_channels(); c += kPanel) {
            const s64 count = std::min<s64>(kPanel, g.in_channels() - c);
            s64 total[kPanel] = {};
            for (s64 part = 0; part < p.tile_parts; ++part)
                for (s64 j = 0; j < kPanel; ++j) total[j] += sums[part * p.part_size(g.out_channels()) + row * p.row + c + j];
            for (s64 j = 0; j < count; ++j)
                g.dw[row / 9 * g.dw_row + row % 9 * g.in_channels() + c + j] =
                    static_cast<f32>(total[j]) * g.factor.at(row / 9, c + j);
        }
    });
}

void grad_weight(GradWeight g, int threads) {
    // Nobody reads a gradient of weights before the optimizer does, so it leaves the caches to others.
    g.streaming = g.out_channels() * 9 * g.in_channels() * 4 > kStreamedGradient && g.in_channels() % kPanel == 0 &&
                  reinterpret_cast<uintptr_t>(g.dw) % 64 == 0;
    const GradWeightPlan p = plan_grad_weight(g, threads);
    const s64 size = p.part_size(g.out_channels());
    s32* sums = reinterpret_cast<s32*>(scratch<SharedTag>(static_cast<size_t>(p.tile_parts * size) * sizeof(s32)));
    parallel_for(threads, p.tile_parts * p.channel_parts, [&](s64 item) {
        const s64 tile_part = item / p.channel_parts;
        grad_weight_part(g, p, tile_part, item % p.channel_parts, sums + tile_part * size);
    });
    if (p.tile_parts != 1) add_parts(g, p, sums, threads);
}

}  // namespace
}  // namespace byteback
