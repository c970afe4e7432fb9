// SPDX-License-Identifier: Apache-2.0
// Output and grad_input of any convolution as an implicit matrix product.
//
//   rows      pixels of a grid over the result
//   depth     taps x source channels; a row of A is gathered tap by tap, zeros where a tap falls into the padding
//   columns   result channels
//
// grad_input is the same product with source = grad_output and the weights read backwards. With a stride, the pixels of
// the result fall into stride_d * stride_h * stride_w phases; all pixels of a phase meet the same taps, so each phase is
// one such product. `Micro` is the multiply kernel (gemm_micro_*.h).
#pragma once

#include <cmath>
#include <vector>

#include "conv/gemm/tap_phases.h"

namespace byteback {
namespace {

constexpr s64 kBlockBytes = 400'000;    // of A and C that stay in the second-level cache
constexpr s64 kStreamBytes = 16 << 20;  // results larger than this bypass the caches

// A stretch of one tap's channels that goes into one depth block.
struct Segment {
    s64 tap, begin, length, position;
};

struct DepthBlock {
    DepthPart part;
    std::vector<Segment> segments;
    std::vector<Piece> pieces;

    // Products that one sum gets from it: the zeros that fill up the packed depth add none.
    s64 products() const {
        s64 sum = 0;
        for (const Segment& s : segments) sum += s.length;
        return sum;
    }
};

// Cuts the depth (taps x padded channels) into blocks of at most about `most`.
std::vector<DepthBlock> depth_blocks(s64 taps, s64 depth, s64 padded, s64 most) {
    std::vector<DepthBlock> blocks;
    if (padded <= most) {
        const s64 count = ceil_div(taps * padded, most), each = ceil_div(taps, count);
        for (s64 first = 0; first < taps; first += each) {
            const s64 last = std::min(taps, first + each);
            DepthBlock block{{first * padded, (last - first) * padded}, {}, {}};
            for (s64 t = first; t < last; ++t) block.segments.push_back({t, 0, depth, (t - first) * padded});
            blocks.push_back(block);
        }
        return blocks;
    }
    const s64 each = round_up(ceil_div(padded, ceil_div(padded, most)), 16);
    for (s64 t = 0; t < taps; ++t)
        for (s64 c = 0; c < padded; c += each) {
            const s64 length = std::min(each, padded - c);
            blocks.push_back({{t * padded + c, length}, {{t, c, std::min(length, depth - c), 0}}, {}});
        }
    return blocks;
}

s64 row_of(const Product& p, const Pixel& pixel) {
    s64 flat = pixel.n;
    for (int axis = 0; axis < 3; ++axis)
        flat = flat * p.result_size[axis] + p.result_start[axis] + pixel.at[axis] * p.result_step[axis];
    return flat;
}

f32* result_of(const Product& p, const Pixel& pixel) {
    return p.result + row_of(p, pixel) * p.result_channels + p.result_begin;
}

s64 result_bytes(const Product& p) {
    return p.batch * p.result_size[0] * p.result_size[1] * p.result_size[2] * p.result_channels * 4;
}

void write_row(const Product& p, const s32* sums, s64 n, f32* to) {
    const f32* factor = p.factor.values + n * p.factor.row + p.result_begin * p.factor.column;
    write_row(sums, p.columns, factor, p.factor.column != 0, to);
}

void write_row(const Product& p, const s64* sums, s64 n, f32* to) {
    const f32* factor = p.factor.values + n * p.factor.row + p.result_begin * p.factor.column;
    for (s64 j = 0; j < p.columns; ++j) to[j] = static_cast<f32>(sums[j]) * factor[j * p.factor.column];
}

struct BlockScratch {};
struct FinishScratch {};

// Fetches the source of the block behind this one into the second-level cache, a share with each multiply: else the multipliers
// would rest while a block is gathered from memory. For kernels of one tap; with more, most pixels were read before.
class Ahead {
public:
    Ahead(const Product& product, s64 first, s64 rows, s64 multiplies)
        : p(product), left(p.from.taps() == 1 && rows > 0 ? rows : 0), share(left ? ceil_div(rows, multiplies) : 0),
          pixel(left ? pixel_of(first, p.grid) : Pixel{}) {}

    void fetch() {
        for (s64 i = std::min(share, left); i > 0; --i, --left, next_pixel(pixel, p.grid)) {
            const s8* row = p.from.at(p.from.origin(pixel), 0);
            for (s64 c = 0; c < p.depth; c += 64) __builtin_prefetch(row + c, 0, 2);
        }
    }

private:
    const Product& p;
    s64 left;
    const s64 share;
    Pixel pixel;
};

template <class Micro>
class Runner {
public:
    Runner(const Product& product, const Weights& w, int threads)
        : p(product), padded(round_up(p.depth, Micro::kUnit)), length(static_cast<s64>(p.taps.size()) * padded),
          rows(p.batch * p.grid_pixels()), padded_columns(round_up(p.columns, kColumns)),
          blocks(depth_blocks(static_cast<s64>(p.taps.size()), p.depth, padded, Micro::kDepth)) {
        std::vector<DepthPart> parts;
        for (DepthBlock& block : blocks) {
            for (const Segment& s : block.segments)
                add_piece(block.pieces, {p.from.offset(s.tap) + s.begin, s.length, s.position});
            parts.push_back(block.part);
            widest = std::max(widest, block.part.length);
        }
        stride = round_up(widest * Micro::kBytes + 32, 64) + 64;  // an odd number of lines: rows do not share cache sets
        const s64 bytes = packed_bytes<Micro>(p, padded, static_cast<s64>(parts.size()));
        weights = pack_weights<Micro>(p, w, padded, parts, threads, scratch<WeightScratch>(static_cast<size_t>(bytes)));
    }

    void run(int threads) {
        // One depth block and full panels: the sums are final when they leave the registers.
        const bool whole = Micro::kExact || p.columns % kColumns == 0;
        const bool direct = blocks.size() == 1 && whole && p.factor.row == 0;
        const s64 c_bytes = direct && !p.finish ? 0 : padded_columns * 4;
        // Every block ends in the second-level cache, its rows in the first-level one if their sums are written once; and every
        // thread gets as many blocks as the others.
        const s64 a_bytes = widest * Micro::kBytes;
        const auto fits = [&](s64 n) {
            return n * (a_bytes + c_bytes) <= kBlockBytes && (!direct || n * a_bytes <= Micro::kNearBytes);
        };
        s64 each = Micro::kRows * 16;
        while (each > Micro::kRows * 4 && !fits(each)) each -= Micro::kRows;
        const s64 count = round_up(ceil_div(rows, each), threads);
        each = round_up(ceil_div(rows, count), Micro::kRows);
        parallel_for(threads, ceil_div(rows, each), [&](s64 i) {
            const s64 first = i * each, n = std::min(each, rows - first);
            if (direct)
                run_direct(first, n);
            else
                run_block(first, n);
        });
    }

private:
    void run_direct(s64 first, s64 count) {
        char* A = scratch<BlockScratch>(static_cast<size_t>(round_up(count, Micro::kRows) * stride + 64));
        gather(blocks[0], first, count, A);
        std::vector<f32*> to(static_cast<size_t>(count));
        f32* own = p.finish ? floats(count * p.columns) : nullptr;
        bool aligned = !own && result_bytes(p) > kStreamBytes && p.columns % kColumns == 0;
        for_lines(first, count, [&](s64 begin, s64 n, const Pixel& pixel) {
            f32* row = own ? own + begin * p.columns : result_of(p, pixel);
            const s64 step = own ? p.columns : p.result_step[2] * p.result_channels;
            aligned = aligned && reinterpret_cast<uintptr_t>(row) % 64 == 0;
            for (s64 i = begin; i < begin + n; ++i, row += step) to[static_cast<size_t>(i)] = row;
        });
        multiply_to_rows(count, A, to.data(), aligned,
                         Ahead(p, first + count, std::min(count, rows - first - count),
                               ceil_div(p.columns, kWide) * ceil_div(count, Micro::kRows)));
        if (aligned) end_streams();
        if (own) (*p.finish)(first, count, p.result_begin, p.columns, own);
    }

    // All sums of `count` rows, times their factors, into the rows of the result.
    void multiply_to_rows(s64 count, const char* A, f32* const* to, bool stream, Ahead ahead) const {
        const f32* factors = p.factor.values + p.result_begin * p.factor.column;
        for (s64 j = 0; j < p.columns; j += kWide) {
            const char* B = weights.panels + j * length * Micro::kBytes;
            for (s64 i = 0; i < count; i += Micro::kRows) {
                const Stretch depth{A + i * stride, B, length / Micro::kUnit};
                ahead.fetch();
                Micro::multiply_floats(
                    {&depth, 1, stride, 4, length * kColumns * Micro::kBytes, std::min<s64>(Micro::kRows, count - i),
                     std::min(kWide, p.columns - j), weights.start(0, j)},
                    {to + i, j, factors + (p.factor.column ? j : 0), p.factor.column != 0, stream});
            }
        }
    }

    static f32* floats(s64 count) { return reinterpret_cast<f32*>(scratch<FinishScratch>(static_cast<size_t>(count) * 4)); }

    void run_block(s64 first, s64 count) {
        const s64 padded_rows = round_up(count, Micro::kRows);
        const s64 a_bytes = padded_rows * stride + 64;  // stride is a multiple of 64
        const bool deep = static_cast<s64>(p.taps.size()) * p.depth > kInt32Depth;
        char* A = scratch<BlockScratch>(static_cast<size_t>(a_bytes + padded_rows * padded_columns * 4));
        s32* C = reinterpret_cast<s32*>(A + a_bytes);
        std::vector<s64> wide(deep ? static_cast<size_t>(count * padded_columns) : 0, 0);
        s64 summed = 0;  // products in each sum of C since it was last emptied
        for (size_t part = 0; part < blocks.size(); ++part) {
            const s64 products = blocks[part].products();
            if (summed + products > kInt32Depth) {
                widen(C, count, wide);
                summed = 0;
            }
            gather(blocks[part], first, count, A);
            multiply(static_cast<s64>(part), A, count, C, summed > 0);
            summed += products;
        }
        if (deep) widen(C, count, wide);
        Pixel pixel = pixel_of(first, p.grid);
        const bool together = p.finish && p.finish->in_order;  // else each row is finished while it is near
        f32* own = p.finish ? floats((together ? count : 1) * p.columns) : nullptr;
        for (s64 i = 0; i < count; ++i, next_pixel(pixel, p.grid)) {
            f32* to = own ? own + (together ? i : 0) * p.columns : result_of(p, pixel);
            if (deep)
                write_row(p, wide.data() + i * padded_columns, pixel.n, to);
            else
                write_row(p, C + i * padded_columns, pixel.n, to);
            if (own && !together) (*p.finish)(first + i, 1, p.result_begin, p.columns, own);
        }
        if (together) (*p.finish)(first, count, p.result_begin, p.columns, own);
    }

    // body(i, n, pixel) for the rows i .. i + n - 1 of a block, which are `pixel` and those beside it in one line of the grid.
    template <class Body>
    void for_lines(s64 first, s64 count, const Body& body) const {
        Pixel pixel = pixel_of(first, p.grid);
        for (s64 i = 0; i < count;) {
            const s64 n = std::min(count - i, p.grid[2] - pixel.at[2]);
            body(i, n, pixel);
            i += n;
            pixel.at[2] += n - 1;
            next_pixel(pixel, p.grid);
        }
    }

    void gather(const DepthBlock& block, s64 first, s64 count, char* A) const {
        for_lines(first, count, [&](s64 begin, s64 n, Pixel pixel) {
            const Gather::Line line = p.from.line(pixel, n);
            const s8* base = line.base;
            char* to = A + begin * stride;
            for (s64 i = 0; i < n; ++i, ++pixel.at[2], base += line.step, to += stride) {
                if (i < line.begin || i >= line.end)
                    gather_pixel(block, pixel, to);
                else
                    for (const Piece& piece : block.pieces)
                        Micro::pack_row_a(to + piece.position * Micro::kBytes, base + piece.offset, piece.length);
            }
        });
    }

    void gather_pixel(const DepthBlock& block, const Pixel& pixel, char* to) const {
        const Gather::Origin origin = p.from.origin(pixel);
        for (const Segment& s : block.segments)
            Micro::pack_row_a(to + s.position * Micro::kBytes, p.from.at(origin, s.tap) + s.begin, s.length);
    }

    void multiply(s64 part, const char* A, s64 count, s32* C, bool accumulate) const {
        const DepthPart& part_of = blocks[static_cast<size_t>(part)].part;
        for (s64 j = 0; j < padded_columns; j += kWide) {
            const char* B = weights.panels + (j * length + part_of.start * kColumns) * Micro::kBytes;
            for (s64 i = 0; i < count; i += Micro::kRows) {
                const Stretch depth{A + i * stride, B, part_of.length / Micro::kUnit};
                Micro::multiply_sums(
                    {&depth, 1, stride, 4, length * kColumns * Micro::kBytes, std::min<s64>(Micro::kRows, count - i),
                     std::min(kWide, p.columns - j), weights.start(part, j)},
                    {C + i * padded_columns + j, padded_columns, kColumns, accumulate});
            }
        }
    }

    void widen(const s32* C, s64 count, std::vector<s64>& wide) const {
        for (s64 i = 0; i < count * padded_columns; ++i) wide[static_cast<size_t>(i)] += C[i];
    }

    static constexpr s64 kWide = Micro::kPanels * kColumns;  // columns of a block

    const Product& p;
    const s64 padded, length, rows, padded_columns;  // of a tap's channels, of all taps' together; of the result
    std::vector<DepthBlock> blocks;
    PackedWeights weights{};
    s64 widest = 0, stride = 0;
};

template <class Micro>
void run_product(const Product& p, const Weights& w, int threads) {
    if (p.taps.empty() || p.batch * p.grid_pixels() == 0) return;
    Runner<Micro>(p, w, threads).run(threads);
}

template <class Micro>
void output_group(const ConvShape& s, s64 group, const s8* x, const s8* w, Factor factor, f32* y, int threads,
                  const Epilogue* finish) {
    const s64 C = s.group_in(), K = s.group_out(), taps = s.taps();
    Product p{};
    p.taps = forward_taps(s);
    p.from = Gather(x, s.in, s.in_channels, group * C, C, s.stride, p.taps);
    p.depth = C, p.batch = s.batch, p.factor = factor, p.finish = finish;
    p.result = y, p.result_size = s.out, p.result_channels = s.out_channels, p.result_begin = group * K, p.columns = K;
    for (int axis = 0; axis < 3; ++axis) {
        p.grid[axis] = s.out[axis];
        p.result_step[axis] = 1;
    }
    run_product<Micro>(p, {w + group * K * taps * C, taps, C, true}, threads);
}

// What a pixel gets that no tap reaches: the integer 0 times the factor, which is 0, but NaN where two scales have an infinite
// product.
void write_zeros(const ConvShape& s, Factor factor, f32* dx, int threads) {
    const std::vector<char> met[3] = {phases_met(s, 0), phases_met(s, 1), phases_met(s, 2)};
    const auto is_met = [&](int axis, s64 at) {
        return met[axis][static_cast<size_t>((at + s.padding[axis]) % s.stride[axis])] != 0;
    };
    bool finite = true;
    for (s64 n = 0; n < (factor.row ? s.batch : 1); ++n)
        for (s64 c = 0; c < (factor.column ? s.in_channels : 1); ++c) finite = finite && std::isfinite(factor.at(n, c));
    const s64 row = s.in[2] * s.in_channels, rows = s.batch * s.in[0] * s.in[1];
    const bool stream = rows * row * 4 > kStreamBytes;
    parallel_ranges(threads, rows, [&](int, s64 begin, s64 end) {
        for (s64 i = begin; i < end; ++i) {
            const bool some = is_met(0, i / s.in[1] % s.in[0]) && is_met(1, i % s.in[1]);
            const s64 n = i / (s.in[0] * s.in[1]);
            f32* to = dx + i * row;
            for (s64 v = 0; v < s.in[2]; ++v, to += s.in_channels) {
                if (some && is_met(2, v)) continue;
                if (finite)
                    fill_zeros(to, s.in_channels, stream);
                else
                    for (s64 c = 0; c < s.in_channels; ++c) to[c] = 0.0f * factor.at(n, c);
            }
        }
        if (stream) end_streams();
    });
}

template <class Micro>
void grad_input_group(const ConvShape& s, s64 group, const s8* g, const s8* w, Factor factor, f32* dx, int threads,
                      const Epilogue* finish) {
    const s64 C = s.group_in(), K = s.group_out(), taps = s.taps();
    for (s64 d = 0; d < s.stride[0]; ++d)
        for (s64 h = 0; h < s.stride[1]; ++h)
            for (s64 v = 0; v < s.stride[2]; ++v) {
                Product p{};
                p.depth = K, p.batch = s.batch, p.factor = factor, p.finish = finish;
                p.result = dx, p.result_size = s.in, p.result_channels = s.in_channels, p.result_begin = group * C,
                p.columns = C;
                if (!phase_of(s, {d, h, v}, p)) continue;
                p.from = Gather(g, s.out, s.out_channels, group * K, K, {1, 1, 1}, p.taps);
                run_product<Micro>(p, {w + group * K * taps * C, taps, C, false}, threads);
            }
}

// `finish`: only where the stride is 1, so that the pixels of the one phase are those of dx.
template <class Micro>
void run_grad_input(const ConvShape& s, const s8* g, const s8* w, Factor factor, f32* dx, int threads,
                    const Epilogue* finish = nullptr) {
    if (leaves_pixels_out(s)) write_zeros(s, factor, dx, threads);
    for (s64 group = 0; group < s.groups; ++group) grad_input_group<Micro>(s, group, g, w, factor, dx, threads, finish);
}

template <class Micro>
void run_output(const ConvShape& s, const s8* x, const s8* w, Factor factor, f32* y, int threads, const Epilogue* finish) {
    for (s64 group = 0; group < s.groups; ++group) output_group<Micro>(s, group, x, w, factor, y, threads, finish);
}

}  // namespace
}  // namespace byteback
