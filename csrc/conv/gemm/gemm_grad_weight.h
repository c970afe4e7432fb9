// SPDX-License-Identifier: Apache-2.0
// grad_weight of any convolution as a matrix product.
//
//   rows      taps x input channels (A, gathered from x)
//   depth     pixels of grad_output: the sum runs over them
//   columns   output channels (B, grad_output itself)
//
// Both operands lie pixel by pixel, so `kUnit` pixels are interleaved while packing and no transpose is needed. Both are packed
// kBlock pixels at a time. The rows are cut into tiles, of which one block stays in the first-level cache while it meets every
// panel of 16 columns:
//
//   A      [block][tile][step][row of the tile][unit]
//   B      [block][panel][step][16][unit], with a line between panels: they would share cache sets otherwise
//   sums   [tile][panel][row of the tile][16]
//
// Two ways to share the work, by what stays in the second-level cache:
//   by pixels   each thread owns a stretch of pixels and all of dW; packed operands are used at once. For small dW.
//   by tiles    each thread owns a part of dW and reads every pixel; both operands are packed once for all. For large dW.
// The depth is cut into stretches of at most 131072 pixels, whose sums an int32 holds; more than one are added in int64.
// `Micro` is the multiply kernel (gemm_micro_*.h).
#pragma once

#include <vector>

#include "conv/gemm/gather.h"
#include "conv/gemm/gemm_block.h"
#include "core/parallel.h"

namespace byteback {
namespace {

constexpr s64 kStretch = 131072;  // pixels per int32 sum, below kInt32Depth = 133144
constexpr s64 kBlock = 256;       // pixels packed at a time
constexpr s64 kPackJob = 32;      // pixels that one thread packs for the others
constexpr s64 kFetchAhead = 16;   // pixels: the rows of a packed block are too many streams for the hardware

struct PackScratch {};
struct SumScratch {};
struct OwnScratch {};

template <class Micro>
class GradWeight {
public:
    GradWeight(const ConvShape& shape, s64 group, const s8* gradient, const s8* x)
        : s(shape), from(x, s.in, s.in_channels, group * s.group_in(), s.group_in(), s.stride, forward_taps(s)),
          dense(is_dense(s) ? x + group * s.group_in() : nullptr), g(gradient + group * s.group_out()), C(s.group_in()),
          K(s.group_out()), rows(s.taps() * C),
          tile(round_up(ceil_div(rows, ceil_div(rows, Micro::kTileRows)), Micro::kTileStep)), tiles(ceil_div(rows, tile)),
          panels(ceil_div(K, kColumns)), a_tile(kBlock * tile * Micro::kBytes), b_panel(kBlock * kColumns * Micro::kBytes + 64),
          zeros(static_cast<size_t>(K) + 16, 0),
          sums(reinterpret_cast<s32*>(scratch<SumScratch>(static_cast<size_t>(size()) * 4))) {}

    // Adds up the pixels [first, first + count) of grad_output. `finish(unit)` is called, by some thread, for each unit of
    // `sums` (one tile by one panel) that is complete.
    template <class Finish>
    void stretch(s64 first, s64 count, int threads, const Finish& finish) {
        if (size() * 4 <= Micro::kSumsBytes && count >= 1024 * threads)
            by_pixels(first, count, threads, finish);
        else
            by_tiles(first, count, threads, finish);
    }

    s64 size() const { return tiles * panels * tile * kColumns; }
    const s32* unit_sums(s64 unit) const { return sums + unit * tile * kColumns; }

    const ConvShape& s;
    const Gather from;
    const s8* const dense;  // x, where grid pixel i reads pixel i
    const s8* const g;
    const s64 C, K, rows, tile, tiles, panels;

private:
    static bool is_dense(const ConvShape& s) {
        for (int axis = 0; axis < 3; ++axis)
            if (s.kernel[axis] != 1 || s.stride[axis] != 1 || s.padding[axis] != 0) return false;
        return true;
    }

    s64 a_block() const { return tiles * a_tile; }
    s64 b_block() const { return panels * b_panel; }

    // grad_output of `count` pixels; missing ones up to `padded` are zero.
    void pack_gradient(s64 first, s64 count, s64 padded, char* to) const {
        for (s64 k = 0; k < padded; k += Micro::kUnit) {
            const s8* row[4];
            for (int u = 0; u < Micro::kUnit; ++u) {
                row[u] = k + u < count ? g + (first + k + u) * s.out_channels : zeros.data();
                if (k + u + kFetchAhead < count) fetch(row[u] + kFetchAhead * s.out_channels, K);
            }
            Micro::interleave_b(to + k * kColumns * Micro::kBytes, row, K, K, b_panel);
        }
    }

    // x under the same pixels.
    void pack_input(s64 first, s64 count, s64 padded, char* to) const {
        Gather::Origin origins[kBlock];
        if (!dense) {
            Pixel pixel = pixel_of(first, s.out);
            for (s64 k = 0; k < count; ++k, next_pixel(pixel, s.out)) origins[k] = from.origin(pixel);
        }
        const auto pixel_at = [&](s64 k, s64 tap) {
            return dense ? dense + (first + k) * s.in_channels : from.at(origins[k], tap);
        };
        for (s64 k = 0; k < padded; k += Micro::kUnit)
            for (s64 tap = 0; tap < from.taps(); ++tap) {
                const s8* source[4];
                for (int u = 0; u < Micro::kUnit; ++u) {
                    source[u] = k + u < count ? pixel_at(k + u, tap) : from.zeros();
                    // With several taps most pixels were read before.
                    if (from.taps() == 1 && k + u + kFetchAhead < count) fetch(pixel_at(k + u + kFetchAhead, tap), C);
                }
                pack_step(source, tap * C, to + k * tile * Micro::kBytes);
            }
    }

    // One tap of kUnit pixels into the tiles that its rows fall into.
    void pack_step(const s8* (&source)[4], s64 row, char* to) const {
        for (s64 c = 0; c < C;) {
            const s64 t = (row + c) / tile, at = (row + c) % tile, n = std::min(C - c, tile - at), most = tile - at;
            char* here = to + t * a_tile + at * 4;
            // interleave writes in sixteens: the last ones go round about where they would reach into the next step.
            const s64 whole = round_up(n, 16) <= most ? n : n / 16 * 16;
            Micro::interleave_a(here, source, whole, C - c);
            for (int u = 0; u < Micro::kUnit; ++u) source[u] += whole;
            if (whole < n) {
                char rest[64];
                Micro::interleave_a(rest, source, n - whole, C - c - whole);
                std::memcpy(here + whole * 4, rest, static_cast<size_t>(n - whole) * 4);
                for (int u = 0; u < Micro::kUnit; ++u) source[u] += n - whole;
            }
            c += n;
        }
    }

    static void fetch(const s8* row, s64 bytes) {
        for (s64 byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte);
    }

    template <class Finish>
    void by_pixels(s64 first, s64 count, int threads, const Finish& finish) {
        s32* own = reinterpret_cast<s32*>(scratch<OwnScratch>(static_cast<size_t>(threads * size()) * 4));
        std::vector<char> used(static_cast<size_t>(threads), 0);
        parallel_shares(threads, ceil_div(count, kBlock), [&](int thread, const auto& next) {
            char* A = scratch<PackScratch>(static_cast<size_t>(a_block() + b_block()));
            char* B = A + a_block();
            char& begun = used[static_cast<size_t>(thread)];
            for (s64 begin, end; next(begin, end);)
                for (s64 b = begin; b < end; ++b, begun = 1) {
                    const s64 n = std::min(kBlock, count - b * kBlock), padded = round_up(n, Micro::kUnit);
                    pack_gradient(first + b * kBlock, n, padded, B);
                    pack_input(first + b * kBlock, n, padded, A);
                    for (s64 t = 0; t < tiles; ++t)
                        multiply(A + t * a_tile, B, padded, t, 0, panels, own + thread * size(), begun);
                }
        });
        parallel_for(threads, tiles * panels, [&](s64 unit) {
            const s64 at = unit * tile * kColumns;
            bool any = false;
            for (int thread = 0; thread < threads; ++thread) {
                if (!used[static_cast<size_t>(thread)]) continue;
                const s32* part = own + thread * size() + at;
                take_sums(sums + at, part, tile * kColumns, any);
                any = true;
            }
            finish(unit);
        });
    }

    template <class Finish>
    void by_tiles(s64 first, s64 count, int threads, const Finish& finish) {
        const s64 most = std::max<s64>(1, Micro::kPackedBytes / (a_block() + b_block())), all = ceil_div(count, kBlock);
        const s64 each = ceil_div(all, ceil_div(all, most));  // blocks of a pass
        char* packed = scratch<PackScratch>(static_cast<size_t>(each * (a_block() + b_block())));
        for (s64 done = 0; done < all; done += each)
            pass(first + done * kBlock, std::min(each * kBlock, count - done * kBlock), packed, done > 0, threads,
                 [&](s64 unit) {
                     if (done + each >= all) finish(unit);
                 });
    }

    template <class Finish>
    void pass(s64 first, s64 count, char* A, bool accumulate, int threads, const Finish& finish) {
        const s64 blocks = ceil_div(count, kBlock);
        char* B = A + blocks * a_block();
        parallel_for(threads, ceil_div(count, kPackJob), [&](s64 job) {
            const s64 at = job * kPackJob, b = at / kBlock, k = at % kBlock, n = std::min(kPackJob, count - at);
            const s64 padded = round_up(n, Micro::kUnit);
            pack_input(first + at, n, padded, A + b * a_block() + k * tile * Micro::kBytes);
            pack_gradient(first + at, n, padded, B + b * b_block() + k * kColumns * Micro::kBytes);
        });
        parallel_parts(threads, tiles * panels, [&](s64 begin, s64 end) {
            while (begin < end) {
                const s64 t = begin / panels, p0 = begin % panels, p1 = std::min(panels, p0 + end - begin);
                for (s64 b = 0; b < blocks; ++b) {
                    const s64 padded = round_up(std::min(kBlock, count - b * kBlock), Micro::kUnit);
                    multiply(A + b * a_block() + t * a_tile, B + b * b_block(), padded, t, p0, p1, sums, accumulate || b > 0);
                }
                for (s64 p = p0; p < p1; ++p) finish(t * panels + p);
                begin += p1 - p0;
            }
        });
    }

    // One block of tile t by the panels [p0, p1).
    void multiply(const char* A, const char* B, s64 padded, s64 t, s64 p0, s64 p1, s32* to, bool accumulate) const {
        // Blocks of a tile have about the same height: 64 rows are five times 13 or 12.
        const s64 height = std::min(tile, rows - t * tile), blocks = ceil_div(height, s64{Micro::kRows});
        const s64 each = Micro::kExact ? ceil_div(height, blocks) : Micro::kRows, steps = padded / Micro::kUnit;
        alignas(64) s32 starts[Micro::kPanels * kColumns];
        for (s64 p = p0; p < p1; p += Micro::kPanels) {
            const s64 columns = std::min(K, p1 * kColumns) - p * kColumns, panels_here = std::min<s64>(Micro::kPanels, p1 - p);
            for (s64 i = 0; i < panels_here; ++i) Micro::column_starts(B + (p + i) * b_panel, steps, starts + i * kColumns);
            for (s64 i = 0; i < height; i += each) {
                const Stretch depth{A + i * 4, B + p * b_panel, steps};
                Micro::multiply_sums({&depth, 1, 4, tile * 4, b_panel, std::min(each, height - i),
                                      std::min(columns, panels_here * kColumns), starts},
                                     {to + ((t * panels + p) * tile + i) * kColumns, kColumns, tile * kColumns, accumulate});
            }
        }
    }

    const s64 a_tile, b_panel;  // bytes of a block
    const std::vector<s8> zeros;
    s32* const sums;
};

// sums[row][16 columns] of one unit -> dw[k][row], where row = (tap, c).
template <class Sum>
void write_unit(const Sum* sums, s64 first_row, s64 height, s64 first_k, s64 width, s64 rows, s64 C, Factor factor, f32* dw) {
    for (s64 i = 0; i < height;) {
        const s64 row = first_row + i, c = row % C;
        const bool square = sizeof(Sum) == sizeof(s32) && i + kSquare <= height && c + kSquare <= C;
        if (square)
            write_square(reinterpret_cast<const s32*>(sums + i * kColumns), width,
                         &factor.values[first_k * factor.row + c * factor.column], factor.row, factor.column != 0,
                         dw + first_k * rows + row, rows);
        else
            for (s64 j = 0; j < width; ++j)
                dw[(first_k + j) * rows + row] = static_cast<f32>(sums[i * kColumns + j]) * factor.at(first_k + j, c);
        i += square ? kSquare : 1;
    }
}

template <class Micro>
void grad_weight_group(const ConvShape& s, s64 group, const s8* g, const s8* x, Factor factor, f32* dw, int threads) {
    GradWeight<Micro> product(s, group, g, x);
    const s64 pixels = s.batch * s.out_pixels(), K = product.K, unit_size = product.tile * kColumns;
    const Factor own{factor.values + group * K * factor.row, factor.row, factor.column};
    const auto write = [&](const auto* sums, s64 unit) {
        const s64 row = unit / product.panels * product.tile, k = unit % product.panels * kColumns;
        write_unit(sums, row, std::min(product.tile, product.rows - row), k, std::min(kColumns, K - k), product.rows, product.C,
                   own, dw + group * K * product.rows);
    };
    if (pixels <= kInt32Depth) {
        product.stretch(0, pixels, threads, [&](s64 unit) { write(product.unit_sums(unit), unit); });
        return;
    }
    std::vector<s64> wide(static_cast<size_t>(product.size()), 0);
    for (s64 first = 0; first < pixels; first += kStretch)
        product.stretch(first, std::min(kStretch, pixels - first), threads, [&](s64 unit) {
            s64* to = wide.data() + unit * unit_size;
            for (s64 i = 0; i < unit_size; ++i) to[i] += product.unit_sums(unit)[i];
        });
    parallel_for(threads, product.tiles * product.panels, [&](s64 unit) { write(wide.data() + unit * unit_size, unit); });
}

template <class Micro>
void run_grad_weight(const ConvShape& s, const s8* g, const s8* x, Factor factor, f32* dw, int threads) {
    if (s.batch * s.out_pixels() == 0) {
        std::fill_n(dw, s.out_channels * s.taps() * s.group_in(), 0.0f);
        return;
    }
    for (s64 group = 0; group < s.groups; ++group) grad_weight_group<Micro>(s, group, g, x, factor, dw, threads);
}

}  // namespace
}  // namespace byteback
