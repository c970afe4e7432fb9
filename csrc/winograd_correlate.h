// SPDX-License-Identifier: Apache-2.0
// output and grad_input by Winograd: transform the tiles, multiply, transform back.
//
// Memory decides the order: a transform turns 1 byte of weights into 8, 1 byte of inputs into 4.5. So 16 to 64 result channels at a time,
// whose transformed weights stay in the second-level cache, are made where they are needed and never stored. Transformed inputs are made
// once for all of them: per block of tiles where all result channels fit ("fused"), else for many tiles ahead, shared by all threads.
//
// For winograd_avx2.cpp only, whose opening comment has the algorithm: AVX2 code in an anonymous namespace.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "winograd_memory.h"
#include "winograd_transform.h"
#include "winograd_weights.h"

namespace byteback::avx2 {
namespace {

constexpr s64 kWeightBytes = 600 << 10;  // of transformed weights, to stay in the second-level cache
constexpr s64 kProducts = 2112;          // tiles times result channels whose products are kept, likewise
constexpr s64 kAheadBytes = 8 << 20;     // of transformed inputs, to stay in the third-level cache
constexpr s64 kStreamBytes = 4 << 20;    // of results, beyond which they are not worth keeping in the caches

// y[n, h, w, j] = Σ_{r, s, d} x[n, h + r - pad_h, w + s - pad_w, d] · weights[j, r, s, d]
struct Correlation {
    Tiling tiling;
    Weights weights;
    s64 height, width;         // of the result
    s64 images_per_sample;     // the depth axis counts as batch, but not for the factor
    Factor factor;
    f32* y;
    bool streaming;            // past the caches: y is larger than they are, and made of whole cache lines
};

struct CorrelationPlan {
    s64 block_width;    // result channels whose weights are held at a time
    s64 width_blocks;
    bool fused;         // transformed inputs per block of tiles, not ahead
    s64 batch_tiles;    // tiles between two transforms ahead
    s64 block_tiles;    // tiles that are multiplied and transformed back together
    s64 row;            // bytes from tile to tile in a block of transformed inputs [position][tile][channel]
    s64 plane;          // from position to position

    s64 block_bytes() const { return kPositions * plane; }
};

// Cache lines, but not a multiple of 1 KiB apart: those would share a few sets of the first-level cache.
s64 spread(s64 bytes) {
    bytes = round_up(bytes, 32);
    return bytes % 1024 ? bytes : bytes + 64;
}

CorrelationPlan plan_correlation(const Correlation& c, int threads) {
    CorrelationPlan p;
    const s64 depth = c.weights.depth, width = round_up(c.weights.width, kPanel);
    const s64 affordable = kWeightBytes / (2 * kPositions * depth) / kPanel * kPanel;
    p.width_blocks = ceil_div(width, std::clamp<s64>(affordable, kPanel, 4 * kPanel));
    p.block_width = round_up(ceil_div(width, p.width_blocks), kPanel);
    p.width_blocks = ceil_div(width, p.block_width);
    p.fused = p.width_blocks == 1;
    p.row = spread(2 * round_up(depth, 16));
    const s64 most = kProducts / p.block_width;
    const s64 ahead = std::max(most, kAheadBytes / (kPositions * p.row));
    p.batch_tiles = p.fused ? c.tiling.count : ceil_div(c.tiling.count, ceil_div(c.tiling.count, ahead));
    const s64 blocks = p.fused ? round_up(ceil_div(p.batch_tiles, most), threads) : ceil_div(p.batch_tiles, most);
    p.block_tiles = std::min(round_up(ceil_div(p.batch_tiles, blocks), kRows), round_up(p.batch_tiles, 2));
    p.plane = (ceil_div(p.block_tiles * p.row, 64) | 1) * 64;
    return p;
}

// Tiles first .. last-1 into a block at `at`: [position][tile][channel].
void transform_inputs(const Correlation& c, const CorrelationPlan& p, s64 first, s64 last, char* at) {
    const Tiling& t = c.tiling;
    const s8 *pixels[kPositions], *next[kPositions];
    find_pixels<6>(t, first, pixels);
    for (s64 tile = first; tile < last; ++tile, at += p.row) {
        find_pixels<6>(t, tile + 1, next);
        for_channel_blocks(0, t.channels, t.channels, [&](s64 channel, const auto& load) {
            if (channel % 64 == 0) fetch_pixels<6>(next, channel);
            transform_tile<InputTransform>(
                [&](int i) { return widen(load(pixels[i] + channel)); },
                [&](int position, V v) { _mm256_store_si256(reinterpret_cast<V*>(at + position * p.plane + channel * 2), v); });
        });
        std::copy(next, next + kPositions, pixels);
    }
}

// One thread's memory, and the weights it holds.
struct CorrelationThread {
    s8* staged;
    u16* magnitudes;  // see sum_magnitudes
    s16* panels;
    s32* products;   // [panel][tile][position][column]
    s32* sums;       // [panel][tile][pixel][column]: earlier chunks
    char* inputs;
    s64 chunk;       // summed channels that are brought back together

    void reserve(Arena& arena, const Correlation& c, const CorrelationPlan& p) {
        const s64 panel_count = p.block_width / kPanel;
        arena.reserve(staged, round_up(c.weights.depth, 2) * kStaged);
        arena.reserve(magnitudes, panel_count * ceil_div(c.weights.depth, 16) * kPanel);
        arena.reserve(panels, panel_count * panel_size(c.weights.depth));
        arena.reserve(products, panel_count * p.block_tiles * kTile);
        arena.reserve(sums, chunk_is_safe(9 * kMax * c.weights.depth) ? 0 : panel_count * p.block_tiles * 16 * kPanel);
        arena.reserve(inputs, p.fused ? p.block_bytes() : 0);
    }
};

void prepare_weights(const Correlation& c, const CorrelationPlan& p, s64 first, CorrelationThread& own) {
    const s64 depth = c.weights.depth, panels = ceil_div(std::min(p.block_width, c.weights.width - first), kPanel);
    for (s64 panel = 0; panel < panels; ++panel) {
        stage_panel(c.weights, first + panel * kPanel, own.staged);
        sum_magnitudes(own.staged, depth, own.magnitudes + panel * ceil_div(depth, 16) * kPanel);
        transform_panel(own.staged, depth, own.panels + panel * panel_size(depth));
    }
    own.chunk = safe_chunk(own.magnitudes, panels, depth);
}

// All products of a block of tiles over the summed channels begin .. end-1. Six tiles meet all panels before the next six come, which are
// fetched meanwhile: the panels of one position stay in the first-level cache.
void multiply_chunk(const Correlation& c, const CorrelationPlan& p, const CorrelationThread& own, const char* inputs, s64 tiles,
                    s64 panels, s64 begin, s64 end) {
    const s64 depth = c.weights.depth, lines = panel_lines(depth), pairs = ceil_div(end - begin, 2);
    for (int position = 0; position < kPositions; ++position) {
        const char* plane = inputs + position * p.plane + begin * 2;
        const s16* b = own.panels + (position * lines + begin / 2) * 2 * kPanel;
        for (s64 tile = 0; tile < tiles; tile += kRows) {
            const char* a = plane + tile * p.row;
            const char* next = tile + kRows < tiles ? a + kRows * p.row : plane + p.plane;
            for (s64 panel = 0; panel < panels; ++panel) {
                s32* to = own.products + (panel * p.block_tiles + tile) * kTile + position * kPanel;
                const Ahead ahead = panel == 0 ? Ahead{next, 32} : Ahead{a, 0};
                multiply(std::min<s64>(kRows, tiles - tile), a, p.row, 4, b + panel * panel_size(depth), pairs, to, ahead);
            }
        }
    }
}

// 4x4 x 16 integers to floats in y; the tile may stick out of the image, the panel out of the channels.
void store_tile(const Correlation& c, s64 tile, s64 column, const V (&values)[2][16]) {
    const Tiling& t = c.tiling;
    const s64 image = tile / t.per_image(), at = tile % t.per_image(), columns = c.weights.width - column;
    const s64 top = at / t.tiles_w * 4, left = at % t.tiles_w * 4;
    const s64 rows = std::min<s64>(4, c.height - top), cols = std::min<s64>(4, c.width - left);
    f32* corner = c.y + ((image * c.height + top) * c.width + left) * c.weights.width + column;
    alignas(32) f32 factors[kPanel];
    read_factors(c.factor, image / c.images_per_sample, column, columns, factors);
    const __m256 low = _mm256_load_ps(factors), high = _mm256_load_ps(factors + 8);
    for (s64 i = 0; i < rows; ++i)
        for (s64 j = 0; j < cols; ++j) {
            f32* y = corner + (i * c.width + j) * c.weights.width;
            const __m256 first = _mm256_mul_ps(_mm256_cvtepi32_ps(values[0][i * 4 + j]), low);
            const __m256 second = _mm256_mul_ps(_mm256_cvtepi32_ps(values[1][i * 4 + j]), high);
            if (c.streaming) {
                _mm256_stream_ps(y, first);
                _mm256_stream_ps(y + 8, second);
            } else {
                store_floats(y, first, columns);
                store_floats(y + 8, second, columns - 8);
            }
        }
}

// Products of one tile and panel to results; earlier chunks are added, later ones are still to come unless `last`.
void finish_tile(const Correlation& c, s64 tile, s64 column, const s32* products, s32* sums, bool first, bool last) {
    V values[2][16];
    for (int half = 0; half < 2; ++half) {
        output_2d(products + 8 * half, values[half]);
        V* earlier = reinterpret_cast<V*>(sums) + half;
        for (int i = 0; i < 16; ++i) {
            V v = divide_by_576(values[half][i]);
            if (!first) v = add32(v, earlier[2 * i]);
            if (!last) earlier[2 * i] = v;
            values[half][i] = v;
        }
    }
    if (last) store_tile(c, tile, column, values);
}

void correlate_block(const Correlation& c, const CorrelationPlan& p, const CorrelationThread& own, const char* inputs, s64 first_tile,
                     s64 tiles, s64 first_column) {
    const s64 depth = c.weights.depth, columns = std::min(p.block_width, c.weights.width - first_column);
    const s64 panels = ceil_div(columns, kPanel);
    for (s64 begin = 0; begin < depth; begin += own.chunk) {
        const s64 end = std::min(depth, begin + own.chunk);
        multiply_chunk(c, p, own, inputs, tiles, panels, begin, end);
        for (s64 tile = 0; tile < tiles; ++tile)
            for (s64 panel = 0; panel < panels; ++panel) {
                const s64 at = panel * p.block_tiles + tile;
                finish_tile(c, first_tile + tile, first_column + panel * kPanel, own.products + at * kTile,
                            own.sums + at * 16 * kPanel, begin == 0, end == depth);
            }
    }
}

// Tiles first .. first + count - 1. `ahead` holds their transformed inputs, block by block, unless the plan is fused.
void correlate_batch(const Correlation& c, const CorrelationPlan& p, s64 first, s64 count, const char* ahead, int threads) {
    const s64 blocks = ceil_div(count, p.block_tiles);
    parallel_ranges(threads, p.width_blocks * blocks, [&](int, s64 begin, s64 end) {
        Arena arena;
        CorrelationThread own{};
        own.reserve(arena, c, p);
        arena.begin(scratch<ThreadTag>(static_cast<size_t>(arena.bytes())));
        own.reserve(arena, c, p);
        for (s64 item = begin; item < end; ++item) {
            const s64 column = item / blocks * p.block_width, block = item % blocks;
            if (item == begin || block == 0) prepare_weights(c, p, column, own);
            const s64 tile = first + block * p.block_tiles, tiles = std::min(p.block_tiles, first + count - tile);
            if (p.fused) transform_inputs(c, p, tile, tile + tiles, own.inputs);
            correlate_block(c, p, own, p.fused ? own.inputs : ahead + block * p.block_bytes(), tile, tiles, column);
        }
        _mm_sfence();
    });
}

void correlate(Correlation c, int threads) {
    if (c.tiling.count == 0) return;
    const s64 results = c.tiling.count / c.tiling.per_image() * c.height * c.width * c.weights.width;
    c.streaming = results * 4 > kStreamBytes && c.weights.width % kPanel == 0 && reinterpret_cast<uintptr_t>(c.y) % 64 == 0;
    const CorrelationPlan p = plan_correlation(c, threads);
    const s64 blocks = ceil_div(p.batch_tiles, p.block_tiles);
    char* ahead = p.fused ? nullptr : scratch<SharedTag>(static_cast<size_t>(blocks * p.block_bytes()));
    for (s64 first = 0; first < c.tiling.count; first += p.batch_tiles) {
        const s64 count = std::min(p.batch_tiles, c.tiling.count - first);
        if (!p.fused)
            parallel_ranges(threads, count, [&](int, s64 begin, s64 end) {
                for (s64 tile = begin, next; tile < end; tile = next) {
                    const s64 block = tile / p.block_tiles, at = tile % p.block_tiles;
                    next = std::min(end, (block + 1) * p.block_tiles);
                    transform_inputs(c, p, first + tile, first + next, ahead + block * p.block_bytes() + at * p.row);
                }
            });
        correlate_batch(c, p, first, count, ahead, threads);
    }
}

}  // namespace
}  // namespace byteback::avx2
