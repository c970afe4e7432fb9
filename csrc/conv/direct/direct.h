// SPDX-License-Identifier: Apache-2.0
// Direct convolution of images: the multiply reads every tap in place.
//
// A band of the source's rows is copied once, with 128 added and with the zeros of the padding around it, and stays in the
// second-level cache. In this copy a tap is a distance that is the same for all pixels, so nothing is gathered tap by tap as in
// gemm_product.h, and nothing is transformed as by Winograd: with few channels these cost more than the multiplications.
//
//   output       source = x; the grid of pixels is the output, and its pixels are `stride` source pixels apart
//   grad_input   source = grad_output, weights read backwards; every phase of a stride (tap_phases.h) is a grid of its own, and
//                all phases of a band read the same copy
//
// The results of a band are whole rows in order, which an epilogue gets together. `Micro` packs the operands
// (gemm_micro_*.h), `Kernel` multiplies (direct_micro_*.h).
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "conv/direct/direct_block.h"
#include "conv/gemm/tap_phases.h"

namespace byteback {
namespace {

constexpr s64 kBandBytes = 96 << 10;     // of a band's copy
constexpr s64 kFinishBytes = 256 << 10;  // of a band's results that wait for an epilogue
constexpr s64 kPastCaches = 16 << 20;    // results larger than this bypass the caches

struct BandScratch {};
struct BandResults {};

inline bool is_image(const ConvShape& s) {
    return s.in[0] == 1 && s.out[0] == 1 && s.kernel[0] == 1 && s.stride[0] == 1 && s.padding[0] == 0 && s.groups == 1;
}

inline bool direct_fits_output(const ConvShape& s) {
    return is_image(s) && s.batch * s.in_pixels() * s.in_channels > 0 && s.out_pixels() * s.out_channels > 0 &&
           s.taps() * s.in_channels <= kInt32Depth;
}

inline bool direct_fits_grad_input(const ConvShape& s) {
    return is_image(s) && s.batch * s.in_pixels() * s.in_channels > 0 && s.out_pixels() * s.out_channels > 0 &&
           s.taps() * s.out_channels <= kInt32Depth && !leaves_pixels_out(s);
}

// Fetches bytes into the second-level cache, some for each pixel that is multiplied: else the multipliers would rest while they
// are copied from memory.
struct DirectAhead {
    const s8 *at, *end;
    s64 each;

    void fetch(s64 pixels) {
        const s8* last = std::min(end, at + pixels * each);
        for (; at < last; at += 64) __builtin_prefetch(at, 0, 2);
    }
};

template <class Micro, class Kernel>
class DirectProduct {
public:
    DirectProduct(const s8* from, const s64 (&size)[3], s64 channels, s64 step_y, s64 step_x)
        : source(from), rows(size[1]), columns(size[2]), depth(channels), pixel(round_up(channels, 4)), step{step_y, step_x} {}

    // Products of the same source, each of which writes pixels of its own.
    void add(const Product& product) { grids.push_back({product, {}, {}}); }

    void run(const Weights& weights, int threads) {
        for (Grid& grid : grids) measure(grid.product);
        width = (width - 1) * step[1] + high[1] - low[1] + 1;
        for (Grid& grid : grids) find_stretches(grid);
        pack(weights, threads);
        const Product& p = grids[0].product;
        const s64 line = p.result_size[2] * p.columns * 4;
        finish = p.finish;
        streaming = !finish && p.batch * p.result_size[1] * line > kPastCaches && p.columns % kColumns == 0 &&
                    reinterpret_cast<uintptr_t>(p.result) % 64 == 0;
        s64 most = std::max<s64>(1, kBandBytes / (width * pixel * step[0]));
        if (finish) most = std::min(most, std::max<s64>(1, kFinishBytes / line));
        const s64 bands = std::clamp<s64>(std::max(ceil_div(height, most), ceil_div(2 * threads, p.batch)), 1, height);
        parallel_for(threads, p.batch * bands, [&](s64 item) {
            const s64 band = item % bands;
            run_band(item / bands, height * band / bands, height * (band + 1) / bands);
        });
    }

private:
    struct Grid {
        Product product;
        std::vector<TapStretch> depth;
        PackedWeights packed;
    };

    void measure(const Product& p) {
        for (int axis = 0; axis < 2; ++axis)
            for (const Tap& tap : p.taps) {
                low[axis] = std::min(low[axis], tap.offset[axis + 1]);
                high[axis] = std::max(high[axis], tap.offset[axis + 1]);
            }
        height = std::max(height, p.grid[1]);
        width = std::max(width, p.grid[2]);
    }

    void find_stretches(Grid& grid) const {
        for (const TapRun& run : tap_runs(grid.product.taps))
            grid.depth.push_back({((run.row - low[0]) * width + run.column - low[1]) * pixel, run.first * pixel * kColumns,
                                  run.taps * pixel / 4});
    }

    void pack(const Weights& weights, int threads) {
        s64 bytes = 0;
        for (const Grid& grid : grids) bytes += packed_bytes<Micro>(grid.product, pixel, 1);
        char* to = scratch<WeightScratch>(static_cast<size_t>(bytes));
        for (Grid& grid : grids) {
            const s64 length = static_cast<s64>(grid.product.taps.size()) * pixel;
            grid.packed = pack_weights<Micro>(grid.product, weights, pixel, {{0, length}}, threads, to);
            to += packed_bytes<Micro>(grid.product, pixel, 1);
        }
    }

    // The source's rows first .. last-1 of an image, with zeros where there is none.
    void copy_source(s64 n, s64 first, s64 last, char* to) const {
        const s64 before = std::clamp<s64>(-low[1], 0, width);
        const s64 inside = std::clamp<s64>(columns - low[1], before, width) - before, line = width * pixel;
        for (s64 y = first; y < last; ++y, to += line) {
            if (y < 0 || y >= rows || inside == 0) {
                std::memset(to, Micro::kOffset, static_cast<size_t>(line));
                continue;
            }
            const s8* from = source + ((n * rows + y) * columns + low[1] + before) * depth;
            std::memset(to, Micro::kOffset, static_cast<size_t>(before * pixel));
            if (depth == pixel)
                Micro::pack_row_a(to + before * pixel, from, inside * pixel);
            else
                for (s64 i = 0; i < inside; ++i) {
                    char* at = to + (before + i) * pixel;
                    Micro::pack_row_a(at, from + i * depth, depth);
                    std::memset(at + depth, Micro::kOffset, static_cast<size_t>(pixel - depth));
                }
            std::memset(to + (before + inside) * pixel, Micro::kOffset, static_cast<size_t>((width - before - inside) * pixel));
        }
    }

    void run_band(s64 n, s64 begin, s64 end) const {
        const s64 first = begin * step[0] + low[0], last = (end - 1) * step[0] + high[0] + 1;
        char* A = scratch<BandScratch>(static_cast<size_t>((last - first) * width * pixel));
        copy_source(n, first, last, A);
        const Product& p = grids[0].product;
        const s64 count = (end - begin) * p.grid[2];
        f32* own = finish ? reinterpret_cast<f32*>(scratch<BandResults>(static_cast<size_t>(count * p.columns) * 4)) : nullptr;
        DirectAhead ahead = source_after(n, begin, end, last);
        for (const Grid& grid : grids) run_grid(grid, n, begin, std::min(end, grid.product.grid[1]), A, own, ahead);
        if (streaming) end_streams();
        if (own) (*finish)((n * p.grid[1] + begin) * p.grid[2], count, 0, p.columns, own);
    }

    // The source of the band behind this one, which the same thread copies next as a rule.
    DirectAhead source_after(s64 n, s64 begin, s64 end, s64 last) const {
        const s64 line = columns * depth, image = rows * line;
        const s8 *from = source + n * image + std::clamp<s64>(last, 0, rows) * line,
                 *all = source + grids[0].product.batch * image;
        const s64 bytes = std::min<s64>(all - from, (end - begin) * step[0] * line);
        s64 pixels = 0;
        for (const Grid& grid : grids) pixels += (end - begin) * grid.product.grid[2];
        return {from, from + bytes, ceil_div(bytes, pixels)};
    }

    // Rows of whole groups make one line of them. Others are cut into pieces of nearly the same length.
    static s64 group_of(s64 row) { return row % 7 == 0 ? 7 : row % 4 == 0 ? 4 : 0; }

    void run_grid(const Grid& grid, s64 n, s64 begin, s64 end, const char* A, f32* own, DirectAhead& ahead) const {
        const Product& p = grid.product;
        const s64 panel = static_cast<s64>(p.taps.size()) * pixel * kColumns, row = p.grid[2], group = group_of(row);
        const s64 source_row = step[0] * width * pixel;
        const s64 result_row = own ? row * p.columns : p.result_step[1] * p.result_size[2] * p.columns;
        const s64 first = n * p.result_size[1] + p.result_start[1] + begin * p.result_step[1];
        f32* to = own ? own : p.result + (first * p.result_size[2] + p.result_start[2]) * p.columns;
        DirectBlock block{};
        block.group = group ? group : 7;
        block.depth = grid.depth.data(), block.stretches = static_cast<s64>(grid.depth.size());
        block.pixel = step[1] * pixel, block.panel = panel;
        block.step = p.result_step[2] * p.columns, block.vary = p.factor.column != 0, block.stream = streaming;
        for (s64 j = 0; j < p.columns; j += block.panels * kColumns) {
            block.columns = std::min(2 * kColumns, p.columns - j);
            block.panels = ceil_div(block.columns, kColumns);
            block.B = grid.packed.panels + j / kColumns * panel, block.starts = grid.packed.start(0, j);
            block.factors = p.factor.values + n * p.factor.row + j * p.factor.column;
            const s64 together = group ? end - begin : 1, length = together * row, each = group ? group : 1;
            const s64 most = Kernel::most_pixels(block.group, block.panels), pieces = ceil_div(length, most / each * each);
            for (s64 y = 0; y < end - begin; y += together) {
                s64 at_row = y, at_pixel = 0;
                for (s64 i = 0; i < pieces; ++i) {
                    block.pixels = (length / each * (i + 1) / pieces - length / each * i / pieces) * each;
                    for (s64 done = 0, k = 0; done < block.pixels; done += block.group, ++k) {
                        block.A[k] = A + at_row * source_row + at_pixel * block.pixel;
                        block.to[k] = to + at_row * result_row + at_pixel * block.step + j;
                        at_pixel += std::min(block.group, block.pixels - done);
                        if (at_pixel == row) at_pixel = 0, ++at_row;
                    }
                    if (j == 0) ahead.fetch(block.pixels);
                    Kernel::multiply(block);
                }
            }
        }
    }

    const s8* const source;
    const s64 rows, columns, depth, pixel;  // of the source: its size, and its channels, as they are and to whole steps
    const s64 step[2];                      // source pixels from one pixel of the grid to the next
    std::vector<Grid> grids;
    const Epilogue* finish = nullptr;
    bool streaming = false;
    s64 low[2] = {}, high[2] = {};  // of the taps
    s64 height = 0, width = 0;      // of the largest grid; later the width is that of the copy, in pixels
};

template <class Micro, class Kernel>
void run_direct_output(const ConvShape& s, const s8* x, const s8* w, Factor factor, f32* y, int threads,
                       const Epilogue* finish) {
    Product p{};
    p.taps = forward_taps(s);
    p.depth = s.in_channels, p.batch = s.batch, p.factor = factor, p.finish = finish;
    p.result = y, p.result_size = s.out, p.result_channels = s.out_channels, p.columns = s.out_channels;
    for (int axis = 0; axis < 3; ++axis) {
        p.grid[axis] = s.out[axis];
        p.result_step[axis] = 1;
    }
    DirectProduct<Micro, Kernel> product(x, s.in, s.in_channels, s.stride[1], s.stride[2]);
    product.add(p);
    product.run({w, s.taps(), s.in_channels, true}, threads);
}

// `finish`: only where the stride is 1.
template <class Micro, class Kernel>
void run_direct_grad_input(const ConvShape& s, const s8* g, const s8* w, Factor factor, f32* dx, int threads,
                           const Epilogue* finish) {
    DirectProduct<Micro, Kernel> product(g, s.out, s.out_channels, 1, 1);
    for (s64 h = 0; h < s.stride[1]; ++h)
        for (s64 v = 0; v < s.stride[2]; ++v) {
            Product p{};
            p.depth = s.out_channels, p.batch = s.batch, p.factor = factor, p.finish = finish;
            p.result = dx, p.result_size = s.in, p.result_channels = s.in_channels, p.columns = s.in_channels;
            if (!phase_of(s, {0, h, v}, p)) continue;
            std::sort(p.taps.begin(), p.taps.end(), [](const Tap& a, const Tap& b) {
                return a.offset[1] != b.offset[1] ? a.offset[1] < b.offset[1] : a.offset[2] < b.offset[2];
            });
            product.add(p);
        }
    product.run({w, s.taps(), s.in_channels, false}, threads);
}

}  // namespace
}  // namespace byteback
