// SPDX-License-Identifier: Apache-2.0
// grad_input of a convolution with a stride, for images: all phases of a band of the result together.
//
// gemm_product.h has the phases: the pixels of the result that meet the same taps. Each is a product over neighbouring pixels
// of the gradient, so the gradient's rows under a band are packed once, with zeros around them, and every phase reads them in
// place. Nothing is gathered tap by tap, and the band is written while it is in the cache.
//
//   source   [row][column][channel], `width` columns with the zeros; pixel i of a phase begins i pixels on, across rows too
//   run      taps side by side: their channels lie together, so they are one depth of the multiply
//
// What a phase makes in the columns of zeros is thrown away. `Micro` is the multiply kernel (gemm_micro_*.h).
#pragma once

#include <algorithm>
#include <vector>

#include "conv/gemm/gemm_product.h"

namespace byteback {
namespace {

constexpr s64 kSourceBytes = 96 << 10;  // of a band's packed gradient, to stay in the second-level cache

constexpr s64 kPixelBytes = 12 << 10;  // of those that are multiplied together, to stay in the first-level cache

struct SourceScratch {};

struct Phase {
    Product product;
    std::vector<TapRun> runs;
    PackedWeights packed;
};

template <class Micro>
class Phases {
public:
    // What this is for: whole panels of channels, and images that are wide enough for the zeros beside them not to matter; the
    // slower the multiply, the wider.
    static bool fit(const ConvShape& s) {
        const bool image = s.in[0] == 1 && s.out[0] == 1 && s.kernel[0] == 1 && s.stride[0] == 1 && s.padding[0] == 0;
        const s64 reach = (s.kernel[2] - 1) * s.dilation[2] / s.stride[2], wide = Micro::kBytes == 1 ? 8 : 16;
        const bool any = s.batch > 0 && s.group_in() > 0 && s.group_out() > 0 && s.in[1] > 0 && s.in[2] > 0;
        return image && any && s.stride[1] * s.stride[2] > 1 && s.group_in() % kColumns == 0 && s.group_out() % 16 == 0 &&
               s.taps() * s.group_out() <= kInt32Depth && s.out[2] >= wide * std::max<s64>(1, reach) && !leaves_pixels_out(s);
    }

    Phases(const ConvShape& shape, s64 group, const s8* gradient, const s8* w, Factor factor, f32* dx, int threads)
        : s(shape), K(s.group_out()), source(gradient + group * K), zeros(static_cast<size_t>(K), 0) {
        const s64 C = s.group_in();
        for (s64 h = 0; h < s.stride[1]; ++h)
            for (s64 v = 0; v < s.stride[2]; ++v) {
                Phase phase{};
                Product& p = phase.product;
                p.depth = K, p.batch = s.batch, p.factor = factor;
                p.result = dx, p.result_size = s.in, p.result_channels = s.in_channels;
                p.result_begin = group * C, p.columns = C;
                if (!phase_of(s, {0, h, v}, p)) continue;
                std::sort(p.taps.begin(), p.taps.end(), [](const Tap& a, const Tap& b) {
                    return a.offset[1] != b.offset[1] ? a.offset[1] < b.offset[1] : a.offset[2] < b.offset[2];
                });
                phase.runs = tap_runs(p.taps);
                measure(p);
                phases.push_back(phase);
            }
        width += high[1] - low[1];
        streaming = s.batch * s.in_pixels() * s.in_channels * 4 > kStreamBytes && s.in_channels % kColumns == 0 &&
                    reinterpret_cast<uintptr_t>(dx) % 64 == 0;
        pack({w + group * K * s.taps() * C, s.taps(), C, false}, threads);
    }

    void run(int threads) const {
        const s64 affordable = std::max<s64>(1, kSourceBytes / (width * K * Micro::kBytes));
        const s64 bands = std::clamp<s64>(std::max(ceil_div(height, affordable), ceil_div(2 * threads, s.batch)), 1, height);
        parallel_for(threads, s.batch * bands, [&](s64 item) {
            const s64 band = item % bands;
            run_band(item / bands, height * band / bands, height * (band + 1) / bands);
        });
    }

private:
    // Grows the grid and the reach of the taps to what `p` needs.
    void measure(const Product& p) {
        for (int axis = 0; axis < 2; ++axis)
            for (const Tap& tap : p.taps) {
                low[axis] = std::min(low[axis], tap.offset[axis + 1]);
                high[axis] = std::max(high[axis], tap.offset[axis + 1]);
            }
        height = std::max(height, p.grid[1]);
        width = std::max(width, p.grid[2]);
    }

    void pack(const Weights& w, int threads) {
        const auto needs = [&](const Phase& phase) { return packed_bytes<Micro>(phase.product, K, 1); };
        s64 bytes = 0;
        for (const Phase& phase : phases) bytes += needs(phase);
        char* to = scratch<WeightScratch>(static_cast<size_t>(bytes));
        for (Phase& phase : phases) {
            const s64 depth = static_cast<s64>(phase.product.taps.size()) * K;
            phase.packed = pack_weights<Micro>(phase.product, w, K, {{0, depth}}, threads, to);
            to += needs(phase);
        }
    }

    void pack_zeros(char* to, s64 pixels) const {
        for (s64 i = 0; i < pixels; ++i) Micro::pack_row_a(to + i * K * Micro::kBytes, zeros.data(), K);
    }

    // The gradient's rows under the grid's rows begin .. end-1, and zeros around them.
    void pack_source(s64 n, s64 begin, s64 end, char* to) const {
        const s64 before = std::clamp<s64>(-low[1], 0, width);
        const s64 inside = std::clamp<s64>(s.out[2] - low[1], before, width) - before, pixel = K * Micro::kBytes;
        for (s64 y = begin + low[0]; y < end + high[0]; ++y, to += width * pixel) {
            if (y < 0 || y >= s.out[1] || inside == 0) {
                pack_zeros(to, width);
                continue;
            }
            const s8* from = source + ((n * s.out[1] + y) * s.out[2] + low[1] + before) * s.out_channels;
            pack_zeros(to, before);
            if (s.groups == 1)
                Micro::pack_row_a(to + before * pixel, from, inside * K);
            else
                for (s64 i = 0; i < inside; ++i) Micro::pack_row_a(to + (before + i) * pixel, from + i * s.out_channels, K);
            pack_zeros(to + (before + inside) * pixel, width - before - inside);
        }
    }

    void run_band(s64 n, s64 begin, s64 end) const {
        const s64 pixel = K * Micro::kBytes, rows = end - begin, count = rows * width;
        // The last rows of a multiply may be no pixels at all.
        const s64 slack = high[1] - low[1] + Micro::kRows + 1;
        char* A = scratch<SourceScratch>(static_cast<size_t>(((rows + high[0] - low[0]) * width + slack) * pixel));
        pack_source(n, begin, end, A);
        std::vector<f32*> to(static_cast<size_t>(Micro::kExact ? count : round_up(count, Micro::kRows)));
        for (const Phase& phase : phases) {
            const Product& p = phase.product;
            for (s64 i = 0; i < static_cast<s64>(to.size()); ++i) {
                const s64 y = begin + i / width, x = i % width;
                const bool pixel_of_phase = i < count && y < p.grid[1] && x < p.grid[2];
                to[static_cast<size_t>(i)] = pixel_of_phase ? result_of(p, {n, {0, y, x}}) : nullptr;
            }
            // A few pixels meet all panels before the next ones come: they stay in the first-level cache meanwhile.
            const s64 each = std::max<s64>(1, kPixelBytes / (pixel * (high[0] - low[0] + 1)) / Micro::kRows) * Micro::kRows;
            const s64 all = static_cast<s64>(to.size());
            for (s64 i = 0; i < all; i += each)
                for (s64 j = 0; j < p.columns; j += kWide) run_panels(phase, n, j, A, to, i, std::min(all, i + each));
        }
        if (streaming) end_streams();
    }

    void run_panels(const Phase& phase, s64 n, s64 j, const char* A, const std::vector<f32*>& to, s64 begin, s64 end) const {
        const Product& p = phase.product;
        const s64 pixel = K * Micro::kBytes, panel = static_cast<s64>(p.taps.size()) * K * kColumns * Micro::kBytes;
        const char* B = phase.packed.panels + j / kColumns * panel;
        const f32* factors = p.factor.values + n * p.factor.row + (p.result_begin + j) * p.factor.column;
        std::vector<Stretch> depth(phase.runs.size());
        for (s64 i = begin; i < end; i += Micro::kRows) {
            for (size_t part = 0; part < depth.size(); ++part) {
                const TapRun& run = phase.runs[part];
                const s64 at = (run.row - low[0]) * width + run.column - low[1] + i;
                depth[part] = {A + at * pixel, B + run.first * K * kColumns * Micro::kBytes, run.taps * K / Micro::kUnit};
            }
            Micro::multiply_floats(
                {depth.data(), static_cast<s64>(depth.size()), pixel, 4, panel, std::min<s64>(Micro::kRows, end - i),
                 std::min(kWide, p.columns - j), phase.packed.start(0, j)},
                {to.data() + i, j, factors, p.factor.column != 0, streaming});
        }
    }

    static constexpr s64 kWide = Micro::kPanels * kColumns;  // columns of a block

    const ConvShape& s;
    const s64 K;
    const s8* const source;
    const std::vector<s8> zeros;
    std::vector<Phase> phases;
    bool streaming = false;
    s64 low[2] = {}, high[2] = {}, height = 0, width = 0;  // of the taps; of the largest grid, later with the zeros beside it
};

template <class Micro>
void run_strided_grad_input(const ConvShape& s, const s8* g, const s8* w, Factor factor, f32* dx, int threads,
                            const Epilogue* finish) {
    if (!Phases<Micro>::fit(s)) return run_grad_input<Micro>(s, g, w, factor, dx, threads, finish);
    for (s64 group = 0; group < s.groups; ++group) Phases<Micro>(s, group, g, w, factor, dx, threads).run(threads);
}

}  // namespace
}  // namespace byteback
