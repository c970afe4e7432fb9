// SPDX-License-Identifier: Apache-2.0
// output and grad_input by Winograd: transform the tiles, multiply, transform back.
//
// The order of the loops follows from memory: a transform turns 1 byte of weights into 8, and 1 byte of inputs into 4.5. So the
// weights of 16 to 64 result channels at a time are transformed when they are needed, and only kept in the caches.
// Inputs are transformed once for all result channels: per block of tiles if there is only one block of channels ("fused"),
// otherwise for many tiles ahead. Threads have their own tiles and result channels, and do not wait for each other.
//
// winograd_products.h has the algorithm. Compiled once per path.
#pragma once

#include <algorithm>

#include "core/parallel.h"
#include "conv/winograd/winograd_finish.h"
#include "conv/winograd/winograd_memory.h"
#include "conv/winograd/winograd_strip.h"
#include "conv/winograd/winograd_weights.h"

namespace byteback {
namespace {

constexpr s64 kMaxWidth = 4 * kPanel;   // result channels at a time, so that there are enough tiles at a time
constexpr s64 kShallow = 64;            // fewer summed channels than this: weights are quickly read again, so
constexpr s64 kShallowTiles = 24;       // a block is small, and next to nothing leaves the first two caches
constexpr s64 kStreamBytes = 16 << 20;  // of results: more would not stay in the third-level cache anyway

// What one thread does: tiles and result channels, both as ranges.
struct Share {
    s64 tile_begin, tile_end, column_begin, column_end;
};

struct CorrelationPlan {
    s64 block_width;  // result channels whose weights are held at a time
    bool fused;       // one such block is all: inputs are transformed per block of tiles, not ahead
    s64 batch_tiles;  // tiles whose inputs are transformed ahead
    s64 block_tiles;  // tiles that are multiplied and transformed back together
    s64 row;          // bytes from tile to tile in a block of transformed inputs [position][tile][channel]
    s64 plane;        // from position to position

    s64 block_bytes() const { return kPositions * plane; }
    s64 input_bytes() const { return (fused ? 1 : ceil_div(batch_tiles, block_tiles)) * block_bytes(); }
};

// An even part of `whole`, not longer than `most`.
s64 even_part(s64 whole, s64 most) { return ceil_div(whole, ceil_div(whole, most)); }

CorrelationPlan plan_correlation(const Correlation& c, const Share& share) {
    CorrelationPlan p;
    const s64 depth = c.weights.depth(), width = round_up(share.column_end - share.column_begin, kPanel);
    const s64 affordable = kWeightBytes / (2 * kPositions * depth) / kPanel * kPanel;
    p.block_width = round_up(even_part(width, std::clamp<s64>(affordable, kPanel, kMaxWidth)), kPanel);
    p.fused = p.block_width == width;
    // A multiple of 1 KiB from row to row would put all rows in few sets of the first-level cache.
    p.row = 2 * round_up(depth, kChannels);
    if (p.row % 1024 == 0) p.row += 64;
    const s64 tiles = share.tile_end - share.tile_begin;
    const s64 most = depth < kShallow ? kShallowTiles : kProducts / p.block_width / kRows * kRows;
    p.batch_tiles = p.fused ? tiles : even_part(tiles, std::max(most, kAheadBytes / (kPositions * p.row)));
    p.block_tiles = std::min(p.batch_tiles, round_up(even_part(p.batch_tiles, most), kRows));
    p.plane = (ceil_div(p.block_tiles * p.row, 64) | 1) * 64;
    return p;
}

// Tiles first .. last-1 into a block at `at`: [position][tile][time tap][channel].
void transform_inputs(const Correlation& c, const CorrelationPlan& p, s64 first, s64 last, V* strip, char* at) {
    const Tiling& t = c.tiling;
    const s64 plane = p.plane;  // or the compiler would read it again after every store
    for (s64 begin = first; begin < last; begin += kStripTiles)
        for (s64 tap = 0; tap < c.weights.taps; ++tap) {
            const s64 end = std::min(last, begin + kStripTiles);
            const Strip<InputTransform> tiles(t, begin, end, tap);
            for_vectors(0, t.channels, t.channels, [&](s64 channel, const auto& load) {
                using T = decltype(widen(load(t.data)));
                T* columns = reinterpret_cast<T*>(strip);
                tiles.transform_columns(channel, [&](const s8* pixel) { return widen(load(pixel)); }, columns);
                char* to = at + (begin - first) * p.row + (tap * c.weights.stride + channel) * 2;
                for (s64 tile = 0; tile < end - begin; ++tile, to += p.row)
                    for (int i = 0; i < 6; ++i) {
                        T row[6];
                        tiles.transform_row(columns, tile, i, row);
                        for (int j = 0; j < 6; ++j) store_channels(to + (i * 6 + j) * plane, row[j]);
                    }
            });
        }
}

// One thread's memory, and the weights it holds.
struct CorrelationThread {
    s8* staged;
    u16* magnitudes;  // see sum_magnitudes
    s16* panels;
    s32* products;  // [panel][tile][position][column]
    s32* sums;      // [panel][tile][pixel][column]: earlier chunks
    V* strip;       // see Strip
    char* inputs;   // a block of tiles, or all of a batch, block after block
    f32* factors;   // of the result channels
    s64 chunk;      // summed channels that are brought back together

    void reserve(Arena& arena, const Correlation& c, const CorrelationPlan& p) {
        const s64 panel_count = p.block_width / kPanel;
        arena.reserve(staged, round_up(c.weights.depth(), 2) * kStaged);
        arena.reserve(magnitudes, panel_count * ceil_div(c.weights.depth(), 16) * kPanel);
        arena.reserve(panels, panel_count * panel_size(c.weights.depth()));
        arena.reserve(products, panel_count * p.block_tiles * kTile);
        arena.reserve(sums, chunk_is_safe(9 * kMax * c.weights.depth()) ? 0 : panel_count * p.block_tiles * 16 * kPanel);
        arena.reserve(strip, Strip<InputTransform>::size());
        arena.reserve(inputs, p.input_bytes());
        arena.reserve(factors, p.block_width);
    }
};

void prepare_weights(const Correlation& c, s64 first, s64 columns, CorrelationThread& own) {
    const s64 depth = c.weights.depth(), panels = ceil_div(columns, kPanel);
    for (s64 panel = 0; panel < panels; ++panel) {
        stage_panel(c.weights, first + panel * kPanel, own.staged);
        sum_magnitudes(own.staged, depth, own.magnitudes + panel * ceil_div(depth, 16) * kPanel);
        transform_panel(own.staged, depth, own.panels + panel * panel_size(depth));
    }
    own.chunk = safe_chunk(own.magnitudes, panels, depth);
}

// All products of a block of tiles over the summed channels begin .. end-1. A few tiles (kRows) meet all panels before the next
// ones come, which are fetched meanwhile: the panels of one position stay near the first-level cache. With one panel all tiles
// meet it in one call, or a few tiles all positions.
void multiply_chunk(const Correlation& c, const CorrelationPlan& p, const CorrelationThread& own, const char* inputs, s64 tiles,
                    s64 panels, s64 begin, s64 end) {
    const s64 depth = c.weights.depth(), lines = panel_lines(depth), pairs = ceil_div(end - begin, 2);
    if (panels == 1 && tiles <= kRows) {
        const Repeat over_positions{kPositions, p.plane, lines * 2 * kPanel, kPanel};
        const char* a = inputs + begin * 2;
        multiply(tiles, 1, {a, p.row, 4, own.panels + begin / 2 * 2 * kPanel, 0, pairs, own.products, 0}, {a + p.plane, 32},
                 over_positions);
        return;
    }
    const s64 at_once = panels == 1 ? std::max<s64>(1, tiles / kRows) * kRows : kRows;
    const Repeat over_tiles{at_once / kRows, kRows * p.row, 0, kRows * kTile};
    for (int position = 0; position < kPositions; ++position) {
        const char* plane = inputs + position * p.plane + begin * 2;
        const s16* b = own.panels + (position * lines + begin / 2) * 2 * kPanel;
        for (s64 tile = 0; tile < tiles; tile += at_once) {
            const char* a = plane + tile * p.row;
            const char* next = tile + kRows < tiles ? a + kRows * p.row : plane + p.plane;
            const Multiply block{a,
                                 p.row,
                                 4,
                                 b,
                                 panel_size(depth),
                                 pairs,
                                 own.products + tile * kTile + position * kPanel,
                                 p.block_tiles * kTile};
            multiply(std::min<s64>(kRows, tiles - tile), panels, block, {next, 32},
                     panels == 1 && tile == 0 ? over_tiles : Repeat{});
        }
    }
}

void correlate_block(const Correlation& c, const CorrelationPlan& p, const CorrelationThread& own, const char* inputs,
                     s64 first_tile, s64 tiles, s64 first_column, s64 columns) {
    const s64 depth = c.weights.depth(), panels = ceil_div(columns, kPanel);
    for (s64 begin = 0; begin < depth; begin += own.chunk) {
        const s64 end = std::min(depth, begin + own.chunk);
        multiply_chunk(c, p, own, inputs, tiles, panels, begin, end);
        TileWalk walk(c, first_tile);
        for (s64 tile = 0, image = -1; tile < tiles; ++tile, walk.next()) {
            const TilePlace place = walk.place();
            if (place.image != image)
                for (s64 panel = 0; panel < panels; ++panel) {
                    const s64 column = first_column + panel * kPanel;
                    read_factors(c.factor, place.image / c.tiling.result_frames, column, c.weights.width - column,
                                 own.factors + panel * kPanel);
                }
            image = place.image;
            finish_panels(c, place, first_column, panels, own.factors, own.products + tile * kTile,
                          own.sums + tile * 16 * kPanel, p.block_tiles, begin == 0, end == depth);
        }
    }
}

// Tiles first .. first + count - 1 and all result channels of the share.
void correlate_batch(const Correlation& c, const CorrelationPlan& p, const Share& share, s64 first, s64 count,
                     CorrelationThread& own) {
    const auto for_blocks = [&](const auto& body) {
        for (s64 tile = 0; tile < count; tile += p.block_tiles) {
            char* inputs = own.inputs + (p.fused ? 0 : tile / p.block_tiles * p.block_bytes());
            body(first + tile, std::min(p.block_tiles, count - tile), inputs);
        }
    };
    const auto transform = [&](s64 tile, s64 tiles, char* inputs) {
        transform_inputs(c, p, tile, tile + tiles, own.strip, inputs);
    };
    if (!p.fused) for_blocks(transform);
    for (s64 column = share.column_begin; column < share.column_end; column += p.block_width) {
        const s64 columns = std::min(p.block_width, share.column_end - column);
        prepare_weights(c, column, columns, own);
        for_blocks([&](s64 tile, s64 tiles, char* inputs) {
            if (p.fused) transform(tile, tiles, inputs);
            correlate_block(c, p, own, inputs, tile, tiles, column, columns);
        });
    }
}

void correlate_share(const Correlation& c, const Share& share) {
    const CorrelationPlan p = plan_correlation(c, share);
    Arena arena;
    CorrelationThread own{};
    own.reserve(arena, c, p);
    arena.begin(scratch<ThreadTag>(static_cast<size_t>(arena.bytes())));
    own.reserve(arena, c, p);
    for (s64 tile = share.tile_begin; tile < share.tile_end; tile += p.batch_tiles)
        correlate_batch(c, p, share, tile, std::min(p.batch_tiles, share.tile_end - tile), own);
    end_streams();
}

// Into how many parts the result channels are split, so that a thread has the least to do; the tiles are split into threads /
// parts. That threads need not wait for each other has a price: inputs are transformed once per part of the channels, weights
// once per part of the tiles. Nanoseconds as measured, all per 16 summed channels.
s64 choose_parts(const Correlation& c, int threads) {
    constexpr s64 kMultiply = 100, kInput = 60, kWeight = 480;  // per tile and panel, per tile, per panel
    const s64 panels = ceil_div(c.weights.width, kPanel);
    s64 best = -1, parts = 1;
    for (s64 split = 1; split <= std::min<s64>(threads, panels); ++split) {
        const s64 tiles = ceil_div(c.tiling.count, threads / split), width = ceil_div(panels, split);
        const s64 cost = tiles * width * kMultiply + tiles * kInput + width * kWeight;
        if (best >= 0 && cost >= best) continue;
        best = cost;
        parts = split;
    }
    return parts;
}

void correlate(Correlation c, int threads) {
    if (c.tiling.count == 0) return;
    const s64 results = c.tiling.count / c.tiling.per_image() * c.height * c.width * c.weights.width;
    c.streaming =
        !c.finish && results * 4 > kStreamBytes && c.weights.width % kPanel == 0 && reinterpret_cast<uintptr_t>(c.y) % 64 == 0;
    const s64 panels = ceil_div(c.weights.width, kPanel), count = c.tiling.count;
    const s64 column_parts = choose_parts(c, threads), tile_parts = std::clamp<s64>(threads / column_parts, 1, count);
    parallel_for(threads, tile_parts * column_parts, [&](s64 item) {
        const s64 i = item % tile_parts, j = item / tile_parts;
        correlate_share(c, {count * i / tile_parts, count * (i + 1) / tile_parts, panels * j / column_parts * kPanel,
                            std::min(c.weights.width, panels * (j + 1) / column_parts * kPanel)});
    });
}

}  // namespace
}  // namespace byteback
