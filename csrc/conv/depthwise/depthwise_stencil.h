// SPDX-License-Identifier: Apache-2.0
// Depthwise output and grad_input of square kernels as a stencil over row pairs.
//
// For depthwise.h only. Compiled once per path, after its vectors.
#pragma once

#include "conv/depthwise/depthwise_pairs.h"

namespace byteback {
namespace {

// One axis of a stencil, all known at compile time. A tile has kOuts destination positions and reads kSpan source positions,
// the first of which is start(tile, padding); the next tile's lie kAdvance further. tap(out, source) is the index of the weight
// between the two, or negative where they do not meet.
template <int Kernel, int Stride, int Outs>
struct OutputAxis {
    static constexpr int kKernel = Kernel;
    static constexpr int kOuts = Outs;
    static constexpr int kSpan = (Outs - 1) * Stride + Kernel;
    static constexpr int kAdvance = Outs * Stride;

    static constexpr int tap(int out, int source) {
        const int t = source - out * Stride;
        return t < Kernel ? t : -1;
    }
    static s64 start(s64 tile, s64 padding) { return tile * kAdvance - padding; }
};

// Destination i meets source o under tap t where i + padding = o * stride + t. Tiles hold whole periods of the stride, so which
// taps meet depends only on the place in the tile and on padding % stride (Shift).
template <int Kernel, int Stride, int Periods, int Shift>
struct GradInputAxis {
    static constexpr int kKernel = Kernel;
    static constexpr int kOuts = Stride * Periods;
    static constexpr int kLowest = -((Kernel - 1 - Shift) / Stride);
    static constexpr int kSpan = (kOuts - 1 + Shift) / Stride - kLowest + 1;
    static constexpr int kAdvance = Periods;

    static constexpr int tap(int out, int source) {
        const int t = out + Shift - Stride * (source + kLowest);
        return t < Kernel ? t : -1;
    }
    static s64 start(s64 tile, s64 padding) { return tile * kAdvance + padding / Stride + kLowest; }
};

// A stencil: tiles of Rows::kOuts x Columns::kOuts pixels. Weight vectors that are zero altogether are left out.
template <class RowAxis, class ColumnAxis>
struct Stencil {
    using Rows = RowAxis;
    using Columns = ColumnAxis;
    static constexpr int kPairs = (Rows::kSpan + 1) / 2;
    static constexpr int kTaps = Rows::kKernel * Columns::kKernel;

    struct Index {
        int at[Rows::kOuts][Columns::kOuts][kPairs][Columns::kSpan];  // of the weight vector, or -1
        int start[Rows::kOuts][Columns::kOuts];                       // the one that is met first, column by column
        int count;
    };

    // The taps of the two rows of a pair, -1 where a row has none.
    static constexpr int tap(int row, int column, int source_row, int source_column) {
        const int r = source_row < Rows::kSpan ? Rows::tap(row, source_row) : -1;
        const int s = Columns::tap(column, source_column);
        return r < 0 || s < 0 ? -1 : r * Columns::kKernel + s;
    }

    static constexpr Index make_index() {
        Index index{};
        for (int row = 0; row < Rows::kOuts; ++row)
            for (int column = 0; column < Columns::kOuts; ++column)
                for (int pair = 0; pair < kPairs; ++pair)
                    for (int source = 0; source < Columns::kSpan; ++source) {
                        const bool used =
                            tap(row, column, 2 * pair, source) >= 0 || tap(row, column, 2 * pair + 1, source) >= 0;
                        index.at[row][column][pair][source] = used ? index.count++ : -1;
                    }
        for (int row = 0; row < Rows::kOuts; ++row)
            for (int column = 0; column < Columns::kOuts; ++column) {
                index.start[row][column] = -1;
                for (int source = 0; source < Columns::kSpan; ++source)
                    for (int pair = 0; pair < kPairs; ++pair)
                        if (index.start[row][column] < 0) index.start[row][column] = index.at[row][column][pair][source];
            }
        return index;
    }
    static constexpr Index kIndex = make_index();
};

// The weight vectors of a block of channels. w points at the first of `channels` rows of taps.
template <class S>
void pack_stencil_block(const s8* w, s64 channels, s16* packed) {
    alignas(32) s16 by_tap[S::kTaps + 1][kBlock] = {};  // the last row stays zero and stands for "no tap"
    for (s64 c = 0; c < channels; ++c)
        for (int t = 0; t < S::kTaps; ++t) by_tap[t][c] = w[c * S::kTaps + t];
    const auto values = [&](int tap) { return by_tap[tap < 0 ? S::kTaps : tap]; };
    for (int row = 0; row < S::Rows::kOuts; ++row)
        for (int column = 0; column < S::Columns::kOuts; ++column)
            for (int pair = 0; pair < S::kPairs; ++pair)
                for (int source = 0; source < S::Columns::kSpan; ++source) {
                    const int at = S::kIndex.at[row][column][pair][source];
                    if (at < 0) continue;
                    pair_weights(values(S::tap(row, column, 2 * pair, source)),
                                 values(S::tap(row, column, 2 * pair + 1, source)), packed + at * kCell);
                }
}

// A row of tiles for one block of channels: pair[m] points at the first source column, out[r] at the first destination pixel.
template <class S>
void run_stencil(const s16* const* pair, const s16* weights, Floats factor, f32* const* out, s64 tiles, s64 pixel_stride) {
    using Rows = typename S::Rows;
    using Columns = typename S::Columns;
    V weight[S::kIndex.count];
    unroll<S::kIndex.count>([&](auto i) BYTEBACK_ALWAYS { weight[i] = load(weights + i * kCell); });
    const s16* from[S::kPairs];
    f32* to[Rows::kOuts];
    unroll<S::kPairs>([&](auto m) BYTEBACK_ALWAYS { from[m] = pair[m]; });
    unroll<Rows::kOuts>([&](auto row) BYTEBACK_ALWAYS { to[row] = out[row]; });
    for (s64 tile = 0; tile < tiles; ++tile) {
        V sum[Rows::kOuts][Columns::kOuts];
        unroll<Columns::kSpan>([&](auto source) BYTEBACK_ALWAYS {
            unroll<S::kPairs>([&](auto m) BYTEBACK_ALWAYS {
                const V x = load(from[m] + source * kCell);
                unroll<Rows::kOuts>([&](auto row) BYTEBACK_ALWAYS {
                    unroll<Columns::kOuts>([&](auto column) BYTEBACK_ALWAYS {
                        constexpr int at = S::kIndex.at[row][column][m][source];
                        if constexpr (at == S::kIndex.start[row][column])
                            sum[row][column] = multiply(x, weight[at]);
                        else if constexpr (at >= 0)
                            sum[row][column] = multiply_add(sum[row][column], x, weight[at]);
                    });
                });
            });
        });
        unroll<Rows::kOuts>([&](auto row) BYTEBACK_ALWAYS {
            unroll<Columns::kOuts>([&](auto column) BYTEBACK_ALWAYS {
                write_block(sum[row][column], factor, to[row]);
                to[row] += pixel_stride;
            });
        });
        unroll<S::kPairs>([&](auto m) BYTEBACK_ALWAYS { from[m] += Columns::kAdvance * kCell; });
    }
}

// What output and grad_input have in common: frames of `from` pixels become frames of `to` pixels.
struct Images {
    s64 frames, frames_per_sample, channels;
    s64 from[2], to[2], padding[2];
};

// The row pairs that the tiles of a row share, kept from one row of tiles to the next.
template <class S>
class PairRing {
public:
    // Pairs start 2 rows apart; where tiles advance by an odd number of rows, pairs of both parities are alive.
    static constexpr int kUnit = S::Rows::kAdvance % 2 == 0 ? 2 : 1;
    static constexpr int kSlots = kUnit == 2 ? S::kPairs : 2 * S::kPairs - 1;

    PairRing(const Span& span, s16* memory) : span_(span), memory_(memory) { forget(); }

    void forget() { std::fill(held_, held_ + kSlots, s64{-1}); }

    // The number of the m-th pair of a row of tiles, and the memory it has if it is there.
    static s64 key(s64 tile_row, int m) { return (tile_row * S::Rows::kAdvance + 2 * m) / kUnit; }
    s16* memory(s64 key) const { return memory_ + key % kSlots * span_.size(); }
    bool holds(s64 key) const { return held_[key % kSlots] == key; }
    void now_holds(s64 key) { held_[key % kSlots] = key; }

private:
    const Span span_;
    s16* const memory_;
    s64 held_[kSlots];
};

template <class S>
Span stencil_span(const Images& im) {
    const s64 tiles = ceil_div(im.to[1], S::Columns::kOuts);
    return {im.from[1], im.channels, S::Columns::start(0, im.padding[1]),
            (tiles - 1) * S::Columns::kAdvance + S::Columns::kSpan};
}

// One thread's share of a stencil: rows of tiles, in order.
template <class S>
class StencilRun {
    using Rows = typename S::Rows;
    using Columns = typename S::Columns;

public:
    StencilRun(const Images& im, const s8* source, const s16* weights, Factor factor, f32* destination, const Epilogue* finish)
        : im_(im), finish_(finish), span_(stencil_span<S>(im)), source_(source), weights_(weights), factor_(factor),
          destination_(destination), tiles_(ceil_div(im.to[1], Columns::kOuts)),
          streaming_(!finish && streams(im, destination)), memory_(scratch<ThreadScratch>(static_cast<size_t>(bytes()))),
          ring_(span_, memory_.take<s16>(PairRing<S>::kSlots * span_.size())),
          factors_(memory_.take<f32>(round_up(im.channels, kLane))), spare_(memory_.take<f32>(spare_size())),
          own_(memory_.take<f32>(own_size())) {}

    void rows(s64 begin, s64 end) {
        const s64 per_frame = ceil_div(im_.to[0], Rows::kOuts);
        s64 frame = -1, sample = -1;
        for (s64 at = begin; at < end; ++at) {
            if (at / per_frame != frame) {
                frame = at / per_frame;
                ring_.forget();
            }
            if (sample < 0 || (factor_.row && frame / im_.frames_per_sample != sample)) {
                sample = frame / im_.frames_per_sample;
                fill_factors(factor_, sample, im_.channels, factors_);
            }
            tile_row(frame, at % per_frame);
        }
        if (streaming_) end_streams();
    }

private:
    // Whether the result is too large to be in cache when it is read, and made of whole cache lines.
    static bool streams(const Images& im, const f32* destination) {
        const s64 bytes = im.frames * im.to[0] * im.to[1] * im.channels * static_cast<s64>(sizeof(f32));
        return bytes >= kStreamBytes && im.channels % (2 * kBlock) == 0 && reinterpret_cast<uintptr_t>(destination) % 64 == 0;
    }
    s64 spare_size() const { return im_.to[1] * im_.channels; }
    s64 bytes() const {
        return Carver::bytes<s16>(PairRing<S>::kSlots * span_.size()) + Carver::bytes<f32>(round_up(im_.channels, kLane)) +
               Carver::bytes<f32>(spare_size()) + Carver::bytes<f32>(own_size());
    }
    s64 own_size() const { return finish_ ? Rows::kOuts * im_.to[1] * im_.channels : 0; }  // a row of tiles

    const s8* source_row(s64 frame, s64 row) const {
        if (row < 0 || row >= im_.from[0]) return nullptr;
        return source_ + (frame * im_.from[0] + row) * im_.from[1] * im_.channels;
    }

    void tile_row(s64 frame, s64 tile_row) {
        const s64 first_row = Rows::start(tile_row, im_.padding[0]);
        for (s64 first = 0; first < span_.blocks(); first += kTileBlocks) {
            const s64 last = std::min(first + kTileBlocks, span_.blocks());
            for (int m = 0; m < S::kPairs; ++m) {
                const s64 key = ring_.key(tile_row, m), row = first_row + 2 * m;
                if (!ring_.holds(key))
                    pack_pair(span_, source_row(frame, row), source_row(frame, row + 1), first, last, ring_.memory(key));
            }
            s64 block = first;
            if (streaming_)
                for (; block + 1 < last; block += 2) stream_two_blocks(frame, tile_row, block);
            for (; block < last; ++block) store_block(frame, tile_row, block);
        }
        for (int m = 0; m < S::kPairs; ++m) ring_.now_holds(ring_.key(tile_row, m));
        if (finish_) finish_row(frame, tile_row * Rows::kOuts);
    }

    // Hands a row of tiles to the epilogue.
    void finish_row(s64 frame, s64 row) const {
        const s64 pixels = std::min<s64>(Rows::kOuts, im_.to[0] - row) * im_.to[1];
        const s64 first = (frame * im_.to[0] + row) * im_.to[1];
        (*finish_)(first, pixels, 0, im_.channels, own_);
    }

    // `count` tiles of one block from `tile` on, to out[r], where pixels lie pixel_stride apart.
    void run(s64 tile_row, s64 block, s64 tile, s64 count, f32* const* out, s64 pixel_stride) const {
        const s16* pair[S::kPairs];
        for (int m = 0; m < S::kPairs; ++m)
            pair[m] = ring_.memory(ring_.key(tile_row, m)) + block * span_.block_size() + tile * Columns::kAdvance * kCell;
        run_stencil<S>(pair, weights_ + block * S::kIndex.count * kCell, load_floats(factors_ + block * kBlock), out, count,
                       pixel_stride);
    }

    f32* pixel(s64 frame, s64 row, s64 column, s64 block) const {
        if (finish_) return own_ + (row % Rows::kOuts * im_.to[1] + column) * im_.channels + block * kBlock;
        return destination_ + ((frame * im_.to[0] + row) * im_.to[1] + column) * im_.channels + block * kBlock;
    }

    // Two blocks are whole cache lines: a few pixels of them are staged, then written past the cache.
    void stream_two_blocks(s64 frame, s64 tile_row, s64 block) const {
        constexpr s64 kChunk = 32, kLine = 2 * kBlock;
        alignas(64) f32 stage[Rows::kOuts][kChunk * Columns::kOuts * kLine];
        const s64 row = tile_row * Rows::kOuts, rows = std::min<s64>(Rows::kOuts, im_.to[0] - row);
        for (s64 tile = 0; tile < tiles_; tile += kChunk) {
            const s64 count = std::min(kChunk, tiles_ - tile);
            for (s64 b = 0; b < 2; ++b) {
                f32* out[Rows::kOuts];
                for (int r = 0; r < Rows::kOuts; ++r) out[r] = stage[r] + b * kBlock;
                run(tile_row, block + b, tile, count, out, kLine);
            }
            const s64 column = tile * Columns::kOuts, columns = std::min(count * Columns::kOuts, im_.to[1] - column);
            for (int r = 0; r < rows; ++r) {
                f32* line = pixel(frame, row + r, column, block);
                for (s64 i = 0; i < columns; ++i, line += im_.channels) stream_line(stage[r] + i * kLine, line);
            }
        }
    }

    // Whole tiles of a block go straight to the destination, a row below the image to a spare one.
    void store_block(s64 frame, s64 tile_row, s64 block) const {
        const s64 row = tile_row * Rows::kOuts, lanes = std::min(kBlock, im_.channels - block * kBlock);
        const s64 direct = lanes == kBlock ? im_.to[1] / Columns::kOuts : 0;
        f32* out[Rows::kOuts];
        for (int r = 0; r < Rows::kOuts; ++r) out[r] = row + r < im_.to[0] ? pixel(frame, row + r, 0, block) : spare_;
        run(tile_row, block, 0, direct, out, im_.channels);
        for (s64 tile = direct; tile < tiles_; ++tile) store_part(frame, tile_row, block, tile, lanes);
    }

    // A tile that reaches over the right edge or beyond the last channel.
    void store_part(s64 frame, s64 tile_row, s64 block, s64 tile, s64 lanes) const {
        alignas(64) f32 stage[Rows::kOuts][Columns::kOuts][kBlock];
        f32* out[Rows::kOuts];
        for (int r = 0; r < Rows::kOuts; ++r) out[r] = stage[r][0];
        run(tile_row, block, tile, 1, out, kBlock);
        const s64 row = tile_row * Rows::kOuts, column = tile * Columns::kOuts;
        for (s64 r = 0; r < Rows::kOuts && row + r < im_.to[0]; ++r)
            for (s64 c = 0; c < Columns::kOuts && column + c < im_.to[1]; ++c)
                std::memcpy(pixel(frame, row + r, column + c, block), stage[r][c], static_cast<size_t>(lanes) * sizeof(f32));
    }

    const Images im_;
    const Epilogue* const finish_;
    const Span span_;
    const s8* const source_;
    const s16* const weights_;
    const Factor factor_;
    f32* const destination_;
    const s64 tiles_;
    const bool streaming_;
    Carver memory_;
    PairRing<S> ring_;
    f32* const factors_;
    f32* const spare_;
    f32* const own_;
};

template <class S>
void stencil(const Images& im, const s8* source, const s8* w, Factor factor, f32* destination, int threads,
             const Epilogue* finish = nullptr) {
    const s64 blocks = ceil_div(im.channels, kBlock), block_size = S::kIndex.count * kCell;
    s16* weights = reinterpret_cast<s16*>(scratch<SharedScratch>(static_cast<size_t>(blocks * block_size) * sizeof(s16)));
    for (s64 b = 0; b < blocks; ++b)
        pack_stencil_block<S>(w + b * kBlock * S::kTaps, std::min(kBlock, im.channels - b * kBlock), weights + b * block_size);
    parallel_parts(threads, im.frames * ceil_div(im.to[0], S::Rows::kOuts), [&](s64 begin, s64 end) {
        StencilRun<S>(im, source, weights, factor, destination, finish).rows(begin, end);
    });
}

// Small square kernels over planes (a depth axis that is left alone counts as more frames).
bool is_stencil(const ConvShape& s) {
    const s64 k = s.kernel[1], stride = s.stride[1];
    const bool planes = s.kernel[0] == 1 && s.stride[0] == 1 && s.padding[0] == 0;
    const bool square = s.kernel[2] == k && s.stride[2] == stride && s.dilation[1] == 1 && s.dilation[2] == 1;
    const bool narrow = s.in[2] + s.out[2] < 1 << 16;  // row pairs are scratch memory: keep it small
    return planes && square && narrow && (k == 3 || k == 5 || k == 7) && (stride == 1 || stride == 2);
}

Images planes_of(const ConvShape& s, const s64 (&from)[3], const s64 (&to)[3]) {
    return {s.batch * s.in[0], s.in[0], s.in_channels, {from[1], from[2]}, {to[1], to[2]}, {s.padding[1], s.padding[2]}};
}

template <int K>
void stencil_output(const ConvShape& s, const Images& im, const s8* x, const s8* w, Factor factor, f32* y, int threads,
                    const Epilogue* finish) {
    constexpr int kColumns = K == 3 ? 1 : 2;  // the weights of larger kernels do not fit the registers: use each load twice
    if (s.stride[1] == 1)
        stencil<Stencil<OutputAxis<K, 1, 2>, OutputAxis<K, 1, kColumns>>>(im, x, w, factor, y, threads, finish);
    else
        stencil<Stencil<OutputAxis<K, 2, 2>, OutputAxis<K, 2, 1>>>(im, x, w, factor, y, threads, finish);
}

template <int K>
void stencil_grad_input(const ConvShape& s, const Images& im, const s8* g, const s8* w, Factor factor, f32* dx, int threads) {
    constexpr int kColumns = K == 3 ? 1 : 2;
    const bool odd_rows = s.padding[1] % 2, odd_columns = s.padding[2] % 2;
    using Even = GradInputAxis<K, 2, 1, 0>;
    using Odd = GradInputAxis<K, 2, 1, 1>;
    if (s.stride[1] == 1)
        stencil<Stencil<GradInputAxis<K, 1, 2, 0>, GradInputAxis<K, 1, kColumns, 0>>>(im, g, w, factor, dx, threads);
    else if (odd_rows)
        odd_columns ? stencil<Stencil<Odd, Odd>>(im, g, w, factor, dx, threads)
                    : stencil<Stencil<Odd, Even>>(im, g, w, factor, dx, threads);
    else
        odd_columns ? stencil<Stencil<Even, Odd>>(im, g, w, factor, dx, threads)
                    : stencil<Stencil<Even, Even>>(im, g, w, factor, dx, threads);
}

}  // namespace
}  // namespace byteback
