// SPDX-License-Identifier: Apache-2.0
// grad_weight of any convolution as a matrix product.
//
//   rows      taps x input channels (A, gathered from x)
//   depth     pixels of grad_output: the sum runs over them
//   columns   output channels (B, grad_output itself)
//
// Both operands lie pixel by pixel, so `kUnit` pixels are interleaved while packing and no transpose is needed. Two ways to
// share the work, by what stays in the second-level cache:
//   by pixels   each thread owns a stretch of pixels and all of dW; both operands are read once. For small dW.
//   by rows     each thread owns rows of dW and reads every pixel; grad_output is packed once for all. For large dW.
// The depth is cut into stretches of at most 131072 pixels, whose sums an int32 holds; more than one are added in int64.
#include <vector>

#include "avx2.h"
#include "gather.h"
#include "gemm_micro_avx2.h"
#include "parallel.h"

namespace byteback::avx2 {
namespace {

constexpr s64 kColumns = 16;
constexpr s64 kStretch = 131072;      // pixels per int32 sum, below kInt32Depth = 133144
constexpr s64 kSmallBytes = 400'000;  // of dW: up to here each thread keeps its own in the second-level cache
constexpr s64 kPackedBytes = 16 << 20;  // of packed grad_output at a time

constexpr s64 kMaxBlock = 512;        // pixels packed at a time

struct PackScratch {};
struct SumScratch {};
struct OwnScratch {};
struct GradientScratch {};

template <class Micro>
class GradWeight {
public:
    GradWeight(const ConvShape& shape, s64 group, const s8* gradient, const s8* x)
        : s(shape),
          from(x, s.in, s.in_channels, group * s.group_in(), s.group_in(), s.stride, forward_taps(s)),
          g(gradient + group * s.group_out()),
          C(s.group_in()),
          K(s.group_out()),
          taps(s.taps()),
          rows(taps * C),
          padded_rows(round_up(rows, Micro::kRows)),
          columns(round_up(K, kColumns)),
          zeros(static_cast<size_t>(K) + 16, 0),
          size(padded_rows * columns),
          sums(reinterpret_cast<s32*>(scratch<SumScratch>(static_cast<size_t>(size) * 4))) {}

    // Adds the pixels [first, first + count) of grad_output into `sums`, which it overwrites.
    void stretch(s64 first, s64 count, int threads) {
        if (padded_rows * columns * 4 <= kSmallBytes && count >= 1024 * threads)
            by_pixels(first, count, threads);
        else
            by_rows(first, count, threads);
    }

    const s32* totals() const { return sums; }
    s64 count() const { return size; }
    s64 width() const { return columns; }

private:
    // grad_output of `count` pixels as panels [columns / 16][count / unit][16][unit]; missing pixels are zero.
    void pack_gradient(s64 first, s64 count, s64 padded, char* to) const {
        for (s64 k = 0; k < padded; k += Micro::kUnit) {
            const s8* row[4];
            for (int u = 0; u < Micro::kUnit; ++u)
                row[u] = k + u < count ? g + (first + k + u) * s.out_channels : zeros.data();
            for (s64 j = 0; j < columns; j += kColumns) {
                const s8* source[4];
                for (int u = 0; u < Micro::kUnit; ++u) source[u] = row[u] + j;
                Micro::interleave(to + (j * padded + k * kColumns) * Micro::kBytes, source, std::min(kColumns, K - j));
            }
        }
    }

    // x of the same pixels for rows [begin, end) of dW, as [count / unit][rows][unit] with `stride` bytes per step.
    void pack_input(s64 first, s64 count, s64 padded, s64 begin, s64 end, s64 stride, char* to) const {
        Gather::Origin origins[kMaxBlock];
        Pixel pixel = pixel_of(first, s.out);
        for (s64 k = 0; k < count; ++k, next_pixel(pixel, s.out)) origins[k] = from.origin(pixel);
        for (s64 row = begin; row < end;) {
            const s64 tap = row / C, c = row % C, length = std::min(C - c, end - row);
            for (s64 k = 0; k < padded; k += Micro::kUnit) {
                const s8* source[4];
                for (int u = 0; u < Micro::kUnit; ++u)
                    source[u] = (k + u < count ? from.at(origins[k + u], tap) : from.zeros()) + c;
                Micro::interleave(to + k / Micro::kUnit * stride + (row - begin) * 4, source, length);
            }
            row += length;
        }
    }

    void by_pixels(s64 first, s64 count, int threads) {
        const s64 block = rows <= 160 ? kMaxBlock : rows <= 400 ? 256 : 128;
        const s64 stride = round_up(padded_rows * 4 + 64, 64) + 64;
        s32* own = reinterpret_cast<s32*>(scratch<OwnScratch>(static_cast<size_t>(threads * size) * 4));
        std::vector<char> used(static_cast<size_t>(threads), 0);
        parallel_ranges(threads, ceil_div(count, block), [&](int thread, s64 begin, s64 end) {
            if (begin == end) return;
            s32* mine = own + thread * size;
            used[static_cast<size_t>(thread)] = 1;
            const s64 a_bytes = block / Micro::kUnit * stride + 1024;
            char* A = scratch<PackScratch>(static_cast<size_t>(a_bytes + block * columns * Micro::kBytes + 1024));
            char* B = A + a_bytes;
            for (s64 b = begin; b < end; ++b) {
                const s64 at = first + b * block, n = std::min(block, count - b * block), padded = round_up(n, Micro::kUnit);
                pack_gradient(at, n, padded, B);
                pack_input(at, n, padded, 0, rows, stride, A);
                multiply(A, stride, B, padded, padded_rows, mine, b > begin);
            }
        });
        std::fill(sums, sums + size, 0);
        for (int thread = 0; thread < threads; ++thread) {
            if (!used[static_cast<size_t>(thread)]) continue;
            const s32* mine = own + thread * size;
            for (s64 i = 0; i < size; ++i) sums[i] += mine[i];
        }
    }

    void by_rows(s64 first, s64 count, int threads) {
        const s64 per_pass = std::max<s64>(256, round_up(kPackedBytes / (columns * Micro::kBytes), 256));
        const s64 bytes = std::min(per_pass, round_up(count, 256)) * columns * Micro::kBytes + 1024;
        char* packed = scratch<GradientScratch>(static_cast<size_t>(bytes));
        for (s64 done = 0; done < count; done += per_pass)
            rows_pass(first + done, std::min(per_pass, count - done), packed, done > 0, threads);
    }

    void rows_pass(s64 first, s64 count, char* packed, bool accumulate, int threads) {
        constexpr s64 block = 256;
        const s64 blocks = ceil_div(count, block);
        parallel_for(threads, blocks, [&](s64 b) {
            const s64 n = std::min(block, count - b * block);
            pack_gradient(first + b * block, n, round_up(n, Micro::kUnit), packed + b * block * columns * Micro::kBytes);
        });
        s64 each = Micro::kRows * 16;
        while (each > Micro::kRows * 4 && each * columns * 4 > kSmallBytes) each -= Micro::kRows;
        each = round_up(ceil_div(rows, round_up(ceil_div(rows, each), threads)), Micro::kRows);
        const s64 stride = round_up(each * 4 + 64, 64) + 64;
        parallel_for(threads, ceil_div(rows, each), [&](s64 i) {
            const s64 begin = i * each, end = std::min(rows, begin + each), height = round_up(end - begin, Micro::kRows);
            char* A = scratch<PackScratch>(static_cast<size_t>(block / Micro::kUnit * stride + 1024));
            for (s64 b = 0; b < blocks; ++b) {
                const s64 n = std::min(block, count - b * block), padded = round_up(n, Micro::kUnit);
                pack_input(first + b * block, n, padded, begin, end, stride, A);
                multiply(A, stride, packed + b * block * columns * Micro::kBytes, padded, height,
                         sums + begin * columns, accumulate || b > 0);
            }
        });
    }

    void multiply(const char* A, s64 stride, const char* B, s64 depth, s64 height, s32* to, bool accumulate) const {
        for (s64 j = 0; j < columns; j += kColumns)
            for (s64 i = 0; i < height; i += Micro::kRows)
                multiply_block<Micro>(A + i * 4, 4, stride, B + j * depth * Micro::kBytes, depth / Micro::kUnit,
                                      to + i * columns + j, columns, accumulate);
    }

    const ConvShape& s;
    const Gather from;
    const s8* const g;
    const s64 C, K, taps, rows, padded_rows, columns;
    const std::vector<s8> zeros;
    const s64 size;
    s32* const sums;  // [padded_rows][columns]
};

// sums[tap, c][k] -> dw[k][tap][c], in squares of 16 so that every cache line is used whole.
template <class Sum>
void write_result(const Sum* sums, s64 width, const ConvShape& s, s64 group, Factor factor, f32* dw, int threads) {
    const s64 C = s.group_in(), K = s.group_out(), taps = s.taps(), squares = ceil_div(C, kColumns);
    parallel_for(threads, ceil_div(K, kColumns) * taps, [&](s64 job) {
        const s64 k0 = job / taps * kColumns, tap = job % taps, k1 = std::min(K, k0 + kColumns);
        for (s64 square = 0; square < squares; ++square) {
            const s64 c0 = square * kColumns, c1 = std::min(C, c0 + kColumns);
            f32 turned[kColumns][kColumns];
            for (s64 c = c0; c < c1; ++c) {
                const Sum* from = sums + (tap * C + c) * width + k0;
                for (s64 k = 0; k < k1 - k0; ++k) turned[k][c - c0] = static_cast<f32>(from[k]);
            }
            for (s64 k = k0; k < k1; ++k) {
                const s64 out = group * K + k;
                f32* to = dw + (out * taps + tap) * C;
                for (s64 c = c0; c < c1; ++c) to[c] = turned[k - k0][c - c0] * factor.at(out, c);
            }
        }
    });
}

template <class Micro>
void grad_weight_group(const ConvShape& s, s64 group, const s8* g, const s8* x, Factor factor, f32* dw, int threads) {
    GradWeight<Micro> product(s, group, g, x);
    const s64 pixels = s.batch * s.out_pixels();
    if (pixels <= kInt32Depth) {
        product.stretch(0, pixels, threads);
        write_result(product.totals(), product.width(), s, group, factor, dw, threads);
        return;
    }
    std::vector<s64> wide(static_cast<size_t>(product.count()), 0);
    for (s64 first = 0; first < pixels; first += kStretch) {
        product.stretch(first, std::min(kStretch, pixels - first), threads);
        for (size_t i = 0; i < wide.size(); ++i) wide[i] += product.totals()[i];
    }
    write_result(wide.data(), product.width(), s, group, factor, dw, threads);
}

}  // namespace

void gemm_grad_weight(const ConvShape& s, const s8* g, const s8* x, Factor factor, f32* dw, bool nonnegative, int threads) {
    if (s.batch * s.out_pixels() == 0) {
        std::fill_n(dw, s.out_channels * s.taps() * s.group_in(), 0.0f);
        return;
    }
    for (s64 group = 0; group < s.groups; ++group) {
        if (nonnegative)
            grad_weight_group<UnsignedQuads>(s, group, g, x, factor, dw, threads);
        else
            grad_weight_group<SignedPairs>(s, group, g, x, factor, dw, threads);
    }
}

}  // namespace byteback::avx2
