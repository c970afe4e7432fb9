// SPDX-License-Identifier: Apache-2.0
// Depthwise grad_weight: row pairs of g and of x, one accumulator per tap.
//
// For depthwise.h only. Compiled once per path, after its vectors.
#pragma once

#include "conv/depthwise/depthwise_pairs.h"

namespace byteback {
namespace {

// A unit of work is two output rows, or a piece of them. int32 sums are laid out [block][tap][8 channels].
struct GradWeightPlan {
    s64 blocks, taps;
    s64 row_pairs;  // per output plane
    s64 piece;      // columns of a unit
    s64 pieces;     // per row pair
    s64 units;      // in all

    explicit GradWeightPlan(const ConvShape& s)
        : blocks(ceil_div(s.in_channels, kBlock)), taps(s.taps()), row_pairs(ceil_div(s.out[1], 2)),
          piece(std::min<s64>(std::max<s64>(s.out[2], 1), 256)), pieces(ceil_div(s.out[2], piece)),
          units(s.batch * s.out[0] * row_pairs * pieces) {}

    s64 sums() const { return blocks * taps * kBlock; }
};

// sum[r][c] += Σ_column g[column] * x[r][column * stride + c * dilation], the sums of a row of taps lying `sum_stride` apart.
template <int Rows, int Columns>
void accumulate(const s16* g, const s16* const* x, s64 columns, s64 stride, s64 dilation, s32* sums, s64 sum_stride) {
    V sum[Rows][Columns];
    const s16* from[Rows];
    unroll<Rows>([&](auto r) BYTEBACK_ALWAYS { from[r] = x[r]; });
    unroll<Rows>([&](auto r) BYTEBACK_ALWAYS {
        unroll<Columns>([&](auto c) BYTEBACK_ALWAYS { sum[r][c] = load(sums + r * sum_stride + c * kBlock); });
    });
    for (s64 column = 0; column < columns; ++column) {
        const V gv = load(g + column * kCell);
        unroll<Rows>([&](auto r) BYTEBACK_ALWAYS {
            unroll<Columns>([&](auto c) BYTEBACK_ALWAYS {
                const V xv = load(from[r] + c * dilation * kCell);
                sum[r][c] = multiply_add(sum[r][c], gv, xv);
            });
            from[r] += stride * kCell;
        });
    }
    unroll<Rows>([&](auto r) BYTEBACK_ALWAYS {
        unroll<Columns>([&](auto c) BYTEBACK_ALWAYS { store(sums + r * sum_stride + c * kBlock, sum[r][c]); });
    });
}

// One thread's share of grad_weight.
class GradWeightRun {
public:
    GradWeightRun(const ConvShape& s, const GradWeightPlan& plan, const s8* g, const s8* x, s32* sums, s64* deep)
        : s_(s), plan_(plan), g_(g), x_(x), sums_(sums), deep_(deep),
          x_columns_((plan.piece - 1) * s.stride[2] + (s.kernel[2] - 1) * s.dilation[2] + 1),
          held_(static_cast<size_t>(s.kernel[1])), tap_rows_(static_cast<size_t>(s.kernel[1])) {
        const s64 g_size = Span{0, s.in_channels, 0, plan.piece}.size();
        x_size_ = Span{0, s.in_channels, 0, x_columns_}.size();
        Carver memory(scratch<ThreadScratch>(
            static_cast<size_t>(Carver::bytes<s16>(g_size) + Carver::bytes<s16>(x_size_ * s.kernel[1]))));
        g_pair_ = memory.take<s16>(g_size);
        x_pairs_ = memory.take<s16>(x_size_ * s.kernel[1]);
        std::fill(sums_, sums_ + plan.sums(), 0);
        if (deep_) std::fill(deep_, deep_ + plan.sums(), 0);
    }

    void units(s64 begin, s64 end) {
        for (s64 at = begin; at < end; ++at) {
            if (depth_ + 2 * plan_.piece > kInt32Depth) flush();
            unit(at);
            depth_ += 2 * plan_.piece;
        }
    }

    // After the last unit.
    void flush() {
        depth_ = 0;
        if (!deep_) return;
        for (s64 i = 0; i < plan_.sums(); ++i) {
            deep_[i] += sums_[i];
            sums_[i] = 0;
        }
    }

private:
    // A row of x within the batch, and the piece of it that was packed.
    struct Place {
        s64 plane = -1, row = 0, piece = 0;
        bool operator==(const Place& o) const { return plane == o.plane && row == o.row && piece == o.piece; }
    };

    struct Tap {
        s64 row;
        s16* pair;
        bool missing;
    };

    const s8* x_row(s64 plane, s64 row) const {
        if (row < 0 || row >= s_.in[1]) return nullptr;
        return x_ + (plane * s_.in[1] + row) * s_.in[2] * s_.in_channels;
    }

    void unit(s64 at) {
        const s64 piece = at % plan_.pieces, pair = at / plan_.pieces % plan_.row_pairs;
        const s64 out_plane = at / plan_.pieces / plan_.row_pairs;
        const s64 n = out_plane / s_.out[0], od = out_plane % s_.out[0];
        for (s64 t = 0; t < s_.kernel[0]; ++t) {
            const s64 id = od * s_.stride[0] - s_.padding[0] + t * s_.dilation[0];
            if (id >= 0 && id < s_.in[0]) planes(out_plane, n * s_.in[0] + id, t, 2 * pair, piece);
        }
    }

    // Two rows of an output plane against the input plane that they meet under the depth tap t.
    void planes(s64 out_plane, s64 in_plane, s64 t, s64 row, s64 piece) {
        const s64 C = s_.in_channels, first = piece * plan_.piece, columns = std::min(plan_.piece, s_.out[2] - first);
        const Span g_span{s_.out[2], C, first, columns};
        const Span x_span{s_.in[2], C, first * s_.stride[2] - s_.padding[2],
                          (columns - 1) * s_.stride[2] + (s_.kernel[2] - 1) * s_.dilation[2] + 1};
        const s8* g = g_ + (out_plane * s_.out[1] + row) * s_.out[2] * C;
        const s8* g_below = row + 1 < s_.out[1] ? g + s_.out[2] * C : nullptr;
        for (s64 r = 0; r < s_.kernel[1]; ++r)
            find_x_pair(r, {in_plane, row * s_.stride[1] - s_.padding[1] + r * s_.dilation[1], piece});
        for (s64 block = 0; block < plan_.blocks; block += kTileBlocks) {
            const s64 last = std::min(block + kTileBlocks, plan_.blocks);
            pack_pair(g_span, g, g_below, block, last, g_pair_);
            for (const Tap& tap : tap_rows_)
                if (tap.missing)
                    pack_pair(x_span, x_row(in_plane, tap.row), x_row(in_plane, tap.row + s_.stride[1]), block, last, tap.pair);
            for (s64 b = block; b < last; ++b) accumulate_block(b, t, columns, g_span, x_span);
        }
    }

    // Where tap row r finds its pair of rows of x, and whether the unit before has left it there. Tap rows lie `dilation`
    // apart: counted in units of it they are distinct modulo their number.
    void find_x_pair(s64 r, const Place& wanted) {
        const s64 slot = (wanted.row + s_.padding[1]) / s_.dilation[1] % s_.kernel[1];
        Place& held = held_[static_cast<size_t>(slot)];
        tap_rows_[static_cast<size_t>(r)] = {wanted.row, x_pairs_ + slot * x_size_, !(held == wanted)};
        held = wanted;
    }

    void accumulate_block(s64 block, s64 t, s64 columns, const Span& g_span, const Span& x_span) const {
        const s64 R = s_.kernel[1], S = s_.kernel[2], stride = s_.stride[2], dilation = s_.dilation[2];
        const s16* g = g_pair_ + block * g_span.block_size();
        const s64 x_offset = block * x_span.block_size();
        s32* sums = sums_ + (block * plan_.taps + t * R * S) * kBlock;
        if (R == 3 && S == 3) {
            const s16* x[3] = {tap_rows_[0].pair + x_offset, tap_rows_[1].pair + x_offset, tap_rows_[2].pair + x_offset};
            accumulate<3, 3>(g, x, columns, stride, dilation, sums, S * kBlock);
            return;
        }
        for (s64 r = 0; r < R; ++r) {
            const s16* x = tap_rows_[static_cast<size_t>(r)].pair + x_offset;
            for (s64 c = 0; c < S; c += 5, x += 5 * dilation * kCell) {
                s32* to = sums + (r * S + c) * kBlock;
                switch (std::min<s64>(S - c, 5)) {
                    case 1: accumulate<1, 1>(g, &x, columns, stride, dilation, to, 0); break;
                    case 2: accumulate<1, 2>(g, &x, columns, stride, dilation, to, 0); break;
                    case 3: accumulate<1, 3>(g, &x, columns, stride, dilation, to, 0); break;
                    case 4: accumulate<1, 4>(g, &x, columns, stride, dilation, to, 0); break;
                    default: accumulate<1, 5>(g, &x, columns, stride, dilation, to, 0);
                }
            }
        }
    }

    const ConvShape& s_;
    const GradWeightPlan& plan_;
    const s8* const g_;
    const s8* const x_;
    s32* const sums_;
    s64* const deep_;
    s64 depth_ = 0;  // products in each int32 sum
    const s64 x_columns_;
    s64 x_size_ = 0;
    s16* g_pair_ = nullptr;
    s16* x_pairs_ = nullptr;
    std::vector<Place> held_;    // what each slot of x_pairs_ holds
    std::vector<Tap> tap_rows_;  // of the unit at work
};

// The sums of one thread. A type of this file, so that std::vector's code for it stays in this file too.
struct Part {
    s32* sums;
    s64* deep;  // null where int32 is enough for all threads together
    bool used;
};

s64 total(const std::vector<Part>& parts, s64 at) {
    s64 sum = 0;
    for (const Part& part : parts)
        if (part.used) sum += part.deep ? part.deep[at] : part.sums[at];
    return sum;
}

void write_grad_weight(const ConvShape& s, const std::vector<Part>& parts, Factor factor, f32* dw) {
    const s64 taps = s.taps();
    for (s64 c = 0; c < s.in_channels; ++c) {
        const f32 scale = factor.at(c, 0);
        const s64 from = c / kBlock * taps * kBlock + c % kBlock;
        for (s64 t = 0; t < taps; ++t) dw[c * taps + t] = static_cast<f32>(total(parts, from + t * kBlock)) * scale;
    }
}

}  // namespace
}  // namespace byteback
