// SPDX-License-Identifier: Apache-2.0
// grad_weight of a convolution in space with few channels and one group, where a matrix product would mostly pack pixels: once
// for every tap.
//
//     dw[k, r, s, c] = Σ_p g[p, k] · x[p * stride + (r, s), c]
//
// A multiply instruction sums 4 bytes, which here are 4 pixels of an output row that are side by side: a quad. Both operands
// are stored by quads, x once for each horizontal tap s, because a tap moves x by pixels. A vertical tap r only moves to
// another row, and so needs no copy. The last quad of a row may have pixels that do not exist: g is 0 there.
//
//   x    [image][s][panel of 16 channels][row modulo stride][row][quad][16 channels][4 pixels], as x + 128
//   g    [8 filters][image][row][quad][8 filters][4 pixels]
//   sums [8 filters][column][8 filters][16 channels], where a column is a tap and a panel
//
// So g and every tap of x have the same number of quads in a row, and an image is one stretch of steps. A step of the multiply
// kernel reads 8 filters of g and up to 3 columns of x: 24 vectors of sums stay in registers, for about kVisit steps.
//
// x + 128 is unsigned, as the instruction wants it, and a pixel outside of the image is 128: so what the offset adds is
// 128 Σ_p g[p, k] in every column. It is taken off at the end.
//
// A thread packs and multiplies some images, or some rows of a large image, at a time, and has sums of its own. An int32 holds
// those of 133144 pixels; a thread that adds up more of them moves its sums to int64. `Micro` has the vectors
// (direct_grad_weight_micro_*.h).
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/parallel.h"

namespace byteback {
namespace {

constexpr s64 kPanelChannels = 16, kFilters = 8, kQuad = 4;
constexpr s64 kMostColumns = 3;         // of the multiply kernel
constexpr s64 kVector = 64;             // bytes of a quad of 16 channels
constexpr s64 kVisit = 128;             // steps between two readings of the sums
constexpr s64 kChunkBytes = 320 << 10;  // of both packed operands, for the second-level cache
constexpr s64 kMostRowBytes = 1 << 20;  // of the operands of an output row
constexpr s64 kFewSums = 1 << 14;       // that one thread finishes as fast as several

struct ChunkScratch {};
struct ThreadSums {};

// Steps that follow each other in both operands, `x` and `g` bytes from their beginnings.
struct QuadStretch {
    s64 x, g, steps;
};

template <class Micro>
class DirectGradWeight {
public:
    DirectGradWeight(const ConvShape& shape, const s8* gradient, const s8* input, int thread_count)
        : s(shape), C(s.in_channels), K(s.out_channels), x(input), g(gradient), images(s.batch * s.in[0]),
          quads(ceil_div(s.out[2], kQuad)), panels(C / kPanelChannels), columns(s.taps() * panels),
          reach((s.kernel[1] - 1) * s.dilation[1] / s.stride[1]), threads(thread_count),
          line_pixels(
              std::max((kQuad * quads - 1) * s.stride[2] + (s.kernel[2] - 1) * s.dilation[2] + 1, s.padding[2] + s.in[2])) {
        const s64 plane = s.kernel[2] * panels * quads * kVector, planes = std::min(s.stride[1], s.kernel[1]);
        const s64 per_row = plane * planes + K * kQuad * quads, halo = plane * planes * reach, most = kChunkBytes - halo;
        rows = std::clamp<s64>(most / per_row, 1, s.out[1]);
        rows = ceil_div(s.out[1], ceil_div(s.out[1], rows));
        bands = ceil_div(s.out[1], rows);
        if (bands == 1) {
            const s64 wanted = ceil_div(kVisit, steps()), room = kChunkBytes / (halo + rows * per_row);
            together = std::max<s64>(1, std::min({wanted, room, images / (8 * threads)}));
        }
        for (s64 column = 0; column < columns; ++column) {
            const s64 tap = column / panels, down = tap / s.kernel[2] * s.dilation[1], across = tap % s.kernel[2];
            offsets.push_back(line_of(across, column % panels, down % s.stride[1], down / s.stride[1]));
        }
    }

    void run(Factor factor, f32* dw) {
        std::vector<Part> parts(static_cast<size_t>(threads));
        s32* all = reinterpret_cast<s32*>(scratch<ThreadSums>(static_cast<size_t>(threads * part_size()) * 4));
        const s64 chunks = bands > 1 ? images * bands : ceil_div(images, together);
        parallel_shares(threads, chunks, [&](int thread, const auto& next) {
            Part& part = parts[static_cast<size_t>(thread)];
            part.sums = all + thread * part_size();
            Chunk chunk(*this);
            for (s64 begin, end; next(begin, end);) {
                if (part.pixels == 0 && part.wide.empty()) fetch(place_of(begin), 0, 1);
                // What follows a range is most often this thread's too.
                for (s64 i = begin; i < end; ++i)
                    add_chunk(chunk, place_of(i), i + 1 < chunks ? place_of(i + 1) : Place{}, part);
            }
        });
        finish(parts, factor, dw);
    }

private:
    // What a thread has added up.
    struct Part {
        s32* sums = nullptr;      // and behind them Σ g of each filter
        s64 pixels = 0;           // that they hold
        std::vector<s64> wide{};  // what was moved from them
    };

    // What is packed at a time: rows of one image, or whole images, and where they are in x and g.
    struct Place {
        s64 first, count, top, height;
        const s8* sources[2];
        s64 bytes[2];
    };

    // The memory that a thread packs a chunk into.
    struct Chunk {
        char *line, *last, *x, *g;
        std::vector<QuadStretch> stretches{};
        std::vector<s64> visits{};  // where the stretches of each visit end

        explicit Chunk(const DirectGradWeight& d) {
            const s64 line_bytes = round_up(d.line_pixels * d.C, 64), last_bytes = round_up(kQuad * d.K, 64);
            const s64 x_bytes = d.together * d.x_image();
            line = scratch<ChunkScratch>(static_cast<size_t>(line_bytes + last_bytes + x_bytes + d.g_block() * d.K / kFilters));
            last = line + line_bytes;
            x = last + last_bytes;
            g = x + x_bytes;
            std::memset(line, Micro::kZero, static_cast<size_t>(line_bytes));
            std::memset(last, 0, static_cast<size_t>(last_bytes));
        }
    };

    s64 steps() const { return rows * quads; }
    s64 plane_rows() const { return rows + reach; }
    s64 line_of(s64 across, s64 panel, s64 phase, s64 row) const {
        return (((across * panels + panel) * s.stride[1] + phase) * plane_rows() + row) * quads * kVector;
    }
    s64 x_image() const { return line_of(s.kernel[2], 0, 0, 0); }
    s64 g_image() const { return steps() * kFilters * kQuad; }
    s64 g_block() const { return together * g_image(); }
    s64 sums_size() const { return K * columns * kPanelChannels; }
    s64 part_size() const { return sums_size() + K; }

    Place place_of(s64 index) const {
        const s64 first = bands > 1 ? index / bands : index * together, top = bands > 1 ? index % bands * rows : 0;
        const s64 count = bands > 1 ? 1 : std::min(together, images - first), height = std::min(rows, s.out[1] - top);
        const s64 from = std::clamp<s64>(top * s.stride[1] - s.padding[1], 0, s.in[1]);
        const s64 to = std::clamp<s64>((top + height - 1) * s.stride[1] - s.padding[1] + (s.kernel[1] - 1) * s.dilation[1] + 1,
                                       from, s.in[1]);
        const s64 x_row = s.in[2] * C, g_row = s.out[2] * K;
        const s64 x_rows = (count - 1) * s.in[1] + to - from, g_rows = (count - 1) * s.out[1] + height;
        return {first,
                count,
                top,
                height,
                {x + (first * s.in[1] + from) * x_row, g + (first * s.out[1] + top) * g_row},
                {x_rows * x_row, g_rows * g_row}};
    }

    void add_chunk(Chunk& chunk, const Place& place, const Place& next, Part& part) const {
        const auto& [first, count, top, height, sources, bytes] = place;
        const s64 pixels = count * height * s.out[2];
        if (part.pixels + pixels > kInt32Depth) move_sums(part);
        if (part.pixels == 0) std::fill_n(part.sums + sums_size(), K, 0);
        chunk.stretches.clear();
        chunk.visits.clear();
        s64 depth = 0;
        for (s64 i = 0; i < count; ++i) {
            pack_input(chunk.line, x + (first + i) * s.in[1] * s.in[2] * C, top, height, chunk.x + i * x_image());
            pack_gradient(chunk.last, g + ((first + i) * s.out[1] + top) * s.out[2] * K, height, chunk.g + i * g_image(),
                          part.sums + sums_size());
            const s64 all = height * quads, pieces = ceil_div(all, kVisit + kVisit / 4);
            for (s64 p = 0; p < pieces; ++p) {
                const s64 begin = all * p / pieces, end = all * (p + 1) / pieces;
                chunk.stretches.push_back(
                    {i * x_image() + begin * kVector, i * g_image() + begin * kFilters * kQuad, end - begin});
                depth += end - begin;
                if (depth < kVisit && (p + 1 < pieces || i + 1 < count)) continue;
                chunk.visits.push_back(static_cast<s64>(chunk.stretches.size()));
                depth = 0;
            }
        }
        multiply(chunk, next, part);
        part.pixels += pixels;
    }

    // The rows of an image that the output rows from `top` on read.
    void pack_input(char* line, const s8* image, s64 top, s64 height, char* to) const {
        const s64 pixel = s.stride[2] * C, span = (s.kernel[1] - 1) * s.dilation[1];
        for (s64 phase = 0; phase < std::min(s.stride[1], span + 1); ++phase)
            for (s64 row = 0; row < height + (span - phase) / s.stride[1]; ++row) {
                const s64 from = (top + row) * s.stride[1] + phase - s.padding[1];
                const bool outside = from < 0 || from >= s.in[1];
                char* here = to + line_of(0, 0, phase, row);
                const s64 panel = line_of(0, 1, 0, 0);
                if (outside) {
                    for (s64 p = 0; p < s.kernel[2] * panels; ++p)
                        std::memset(here + p * panel, Micro::kZero, static_cast<size_t>(quads * kVector));
                    continue;
                }
                const s8* source = image + from * s.in[2] * C;
                Micro::copy(line + s.padding[2] * C, source, s.in[2] * C);  // between borders that stay as they are
                for (s64 across = 0; across < s.kernel[2]; ++across)
                    Micro::pack_input(here + across * panels * panel, panel, line + across * s.dilation[2] * C, pixel, quads,
                                      panels);
            }
    }

    void pack_gradient(char* last, const s8* from, s64 height, char* to, s32* filter_sums) const {
        const s64 whole = s.out[2] / kQuad, rest = s.out[2] % kQuad, block = g_block(), next = quads * kFilters * kQuad;
        for (s64 row = 0; row < height; ++row, from += s.out[2] * K, to += next) {
            if (whole > 0) Micro::pack_gradient(to, block, from, K, whole, K, filter_sums);
            if (rest == 0) continue;
            for (s64 i = 0; i < rest; ++i) std::memcpy(last + i * K, from + (whole * kQuad + i) * K, static_cast<size_t>(K));
            Micro::pack_gradient(to + whole * kFilters * kQuad, block, reinterpret_cast<const s8*>(last), K, 1, K, filter_sums);
        }
    }

    // One of `all` equal parts.
    static void fetch(const Place& place, s64 part, s64 all) {
        for (int i = 0; i < 2; ++i) {
            const s64 share = round_up(ceil_div(place.bytes[i], all), 64), end = std::min((part + 1) * share, place.bytes[i]);
            for (s64 at = part * share; at < end; at += 64) __builtin_prefetch(place.sources[i] + at);
        }
    }

    // While it multiplies it fetches what is packed next, a part with every call of the kernel.
    void multiply(const Chunk& chunk, const Place& next, const Part& part) const {
        const s64 calls = ceil_div(columns, kMostColumns) * K / kFilters * static_cast<s64>(chunk.visits.size());
        s64 call = 0, first = 0;
        bool add = part.pixels > 0;
        for (const s64 last : chunk.visits) {
            const QuadStretch* stretches = chunk.stretches.data() + first;
            for (s64 column = 0, n; column < columns; column += n) {
                n = ceil_div(columns - column, ceil_div(columns - column, kMostColumns));  // 4 columns are 2 and 2
                const char* inputs[kMostColumns];
                for (s64 i = 0; i < n; ++i) inputs[i] = chunk.x + offsets[static_cast<size_t>(column + i)];
                for (s64 k = 0; k < K / kFilters; ++k, ++call) {
                    fetch(next, call, calls);
                    Micro::multiply(n, inputs, chunk.g + k * g_block(), stretches, last - first,
                                    part.sums + (k * columns + column) * kFilters * kPanelChannels, add);
                }
            }
            first = last;
            add = true;
        }
    }

    s64 place_of_sums(s64 k, s64 column) const {
        return ((k / kFilters * columns + column) * kFilters + k % kFilters) * kPanelChannels;
    }

    // Of 16 channels. Σ (x + 128) g, modulo 2^32, is made Σ x g.
    template <class Sum>
    void add_sums(const Part& part, s64 k, s64 column, Sum (&total)[kPanelChannels]) const {
        if (part.pixels == 0) return;
        const s32* sums = part.sums + place_of_sums(k, column);
        const u32 offset = 128u * static_cast<u32>(part.sums[sums_size() + k]);
        for (s64 c = 0; c < kPanelChannels; ++c) total[c] += static_cast<s32>(static_cast<u32>(sums[c]) - offset);
    }

    void add_part(const Part& part, s64 k, s64 column, s64 (&total)[kPanelChannels]) const {
        add_sums(part, k, column, total);
        if (part.wide.empty()) return;
        const s64* wide = part.wide.data() + place_of_sums(k, column);
        for (s64 c = 0; c < kPanelChannels; ++c) total[c] += wide[c];
    }

    void move_sums(Part& part) const {
        if (part.pixels == 0) return;
        if (part.wide.empty()) part.wide.assign(static_cast<size_t>(sums_size()), 0);
        for (s64 k = 0; k < K; ++k)
            for (s64 column = 0; column < columns; ++column) {
                s64 total[kPanelChannels] = {};
                add_part(part, k, column, total);
                std::copy_n(total, kPanelChannels, part.wide.data() + place_of_sums(k, column));
            }
        part.pixels = 0;
    }

    void finish(const std::vector<Part>& parts, Factor factor, f32* dw) const {
        const bool narrow = images * s.out[1] * s.out[2] <= kInt32Depth;
        parallel_for(sums_size() > kFewSums ? threads : 1, K, [&](s64 k) {
            f32* to = dw + k * columns * kPanelChannels;
            for (s64 column = 0; column < columns; ++column, to += kPanelChannels) {
                const s64 channel = column % panels * kPanelChannels;
                if (narrow) {
                    s32 total[kPanelChannels] = {};
                    for (const Part& part : parts) add_sums(part, k, column, total);
                    write(total, k, channel, factor, to);
                } else {
                    s64 total[kPanelChannels] = {};
                    for (const Part& part : parts) add_part(part, k, column, total);
                    write(total, k, channel, factor, to);
                }
            }
        });
    }

    template <class Sum>
    static void write(const Sum (&total)[kPanelChannels], s64 k, s64 channel, Factor factor, f32* to) {
        const f32* factors = &factor.values[k * factor.row + channel * factor.column];
        if (factor.column == 0)
            for (s64 c = 0; c < kPanelChannels; ++c) to[c] = static_cast<f32>(total[c]) * *factors;
        else
            for (s64 c = 0; c < kPanelChannels; ++c) to[c] = static_cast<f32>(total[c]) * factors[c * factor.column];
    }

    const ConvShape& s;
    const s64 C, K;
    const s8 *const x, *const g;
    const s64 images, quads, panels, columns;
    const s64 reach;  // rows of a phase beyond those of the output
    const int threads;
    const s64 line_pixels;       // of x with its borders
    s64 rows, bands;             // of the output: rows of a band
    s64 together = 1;            // images that are packed at a time
    std::vector<s64> offsets{};  // of the columns in packed x
};

template <class Micro>
void run_direct_grad_weight(const ConvShape& s, const s8* g, const s8* x, Factor factor, f32* dw, int threads) {
    if (s.batch == 0) return static_cast<void>(std::fill_n(dw, s.out_channels * s.taps() * s.in_channels, 0.0f));
    DirectGradWeight<Micro>(s, g, x, threads).run(factor, dw);
}

}  // namespace
}  // namespace byteback
