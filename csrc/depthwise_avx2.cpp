// SPDX-License-Identifier: Apache-2.0
// Depthwise convolutions (groups == C == K) on AVX2: no sum over channels, so a vector holds channels and nothing is a GEMM.
//
// The multiply is vpmaddwd: 8 channels, for each the sum of two products of int16, exact in int32. Its two products are two
// rows: a *row pair* is the rows a and b of one image, widened to int16 and interleaved, with the zeros of the padding written
// out. Its layout is [block of 8 channels][column][8 channels][a, b], 32 bytes per column, so a kernel walks along a row with
// plain loads: no shuffles, no borders, no channel tails. Making pairs costs one pass over the int8 input, which stays in cache.
//
//   output, grad_input   Square kernels 3, 5, 7 with stride 1 or 2 and dilation 1 (any padding) run as a *stencil*: an output
//                        tile (two rows; for grad_input with stride 2 a tile of 2x2 phases) reads the same row pairs, and the
//                        weights say what each of them is worth to each pixel of the tile. All else takes the tap route: for
//                        each pixel the list of the taps that meet the image, walked over the channels.
//   grad_weight          Always row pairs, of g and of x: vpmaddwd sums over two rows, one accumulator per tap.
//
// Sums of at most kInt32Depth products are kept in int32, deeper ones (only grad_weight has them) overflow into int64 in time.
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "avx2.h"
#include "parallel.h"

namespace byteback::avx2 {

namespace {

constexpr s64 kBlock = 8;             // channels in a vector of int32
constexpr s64 kCell = 2 * kBlock;     // int16 values of one column of a row pair in one block
constexpr s64 kTileBlocks = 32;       // blocks whose row pairs are made and used together: many, for reads that stream

// Results from here on bypass the cache: no line is read only to be overwritten. Measured: 1.2 to 2.5x on 19 to 77 MB, a loss
// below 10 MB.
constexpr s64 kStreamBytes = s64{16} << 20;

// Calls f(0), ..., f(N-1) with compile-time indices: arrays indexed by them become registers.
template <class F, int... I>
[[gnu::always_inline]] inline void unroll_over(const F& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}

template <int N, class F>
[[gnu::always_inline]] inline void unroll(const F& f) {
    unroll_over(f, std::make_integer_sequence<int, N>{});
}

#define BYTEBACK_INLINE __attribute__((always_inline))

__m256i load(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }
void store(void* p, __m256i v) { _mm256_store_si256(static_cast<__m256i*>(p), v); }

// sum + x · w over pairs. Left to itself gcc reorders the additions, then loads twice and spills: twice as slow.
[[gnu::always_inline]] inline __m256i multiply_add(__m256i sum, __m256i x, __m256i w) {
    __m256i product;
    asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "xm"(w), "x"(x));
    return sum;
}

[[gnu::always_inline]] inline __m256i multiply(__m256i x, __m256i w) {
    __m256i product;
    asm("vpmaddwd %1, %2, %0" : "=x"(product) : "xm"(w), "x"(x));
    return product;
}

// 16 bytes of which `count` may be read, the others zero.
__m128i load_bytes(const s8* p, s64 count) {
    if (count >= 16) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    alignas(16) s8 bytes[16] = {};
    std::memcpy(bytes, p, static_cast<size_t>(count));
    return _mm_load_si128(reinterpret_cast<const __m128i*>(bytes));
}

// Parts of one allocation, each aligned to 64 bytes.
class Carver {
public:
    explicit Carver(char* memory) : at_(memory) {}

    template <class T>
    T* take(s64 count) {
        T* part = reinterpret_cast<T*>(at_);
        at_ += bytes<T>(count);
        return part;
    }

    template <class T>
    static s64 bytes(s64 count) {
        return round_up(count * static_cast<s64>(sizeof(T)), 64);
    }

private:
    char* at_;
};

struct SharedScratch;   // owned by the calling thread, read by all
struct ThreadScratch;   // each thread its own

// The factors of the channels of one sample as an array, zero beyond the last channel.
void fill_factors(Factor factor, s64 n, s64 channels, f32* out) {
    for (s64 c = 0; c < channels; ++c) out[c] = factor.at(n, c);
    for (s64 c = channels; c < round_up(channels, 16); ++c) out[c] = 0;
}

// ---------------------------------------------------------------------------------------------------------- row pairs

// What part of a row a pair covers: columns first .. first + columns - 1, of which 0 .. width - 1 exist.
struct Span {
    s64 width, channels;
    s64 first, columns;

    s64 blocks() const { return ceil_div(channels, kBlock); }
    s64 block_size() const { return columns * kCell; }
    s64 size() const { return blocks() * block_size(); }  // in int16
    // The columns that exist, counted from `first`.
    s64 begin() const { return std::clamp<s64>(-first, 0, columns); }
    s64 end() const { return std::clamp<s64>(width - first, begin(), columns); }
};

// A row to read from, and how far its columns and its blocks lie apart.
struct Row {
    const s8* at;
    s64 step, block;
};

// The columns of the row that exist, from a block on; a null row is zeros, read by standing still.
Row existing(const Span& span, const s8* row, s64 block) {
    alignas(16) static constexpr s8 zeros[16] = {};
    if (!row) return {zeros, 0, 0};
    return {row + (span.first + span.begin()) * span.channels + block * kBlock, span.channels, kBlock};
}

// Whole blocks of a row pair, two at a time. Bytes are interleaved before they are widened: so the channels stay in order.
void pack_whole(Row a, Row b, s64 columns, s64 blocks, s64 block_size, s16* cells) {
    for (s64 i = 0; i < columns; ++i) {
        for (s64 block = 0; block < blocks; block += 2) {
            const __m128i va = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a.at + i * a.step + block * a.block));
            const __m128i vb = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b.at + i * b.step + block * b.block));
            s16* to = cells + block * block_size + i * kCell;
            store(to, _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(va, vb)));
            store(to + block_size, _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(va, vb)));
        }
    }
}

// One block, of which only `count` channels exist.
void pack_few(Row a, Row b, s64 columns, s64 count, s16* cells) {
    for (s64 i = 0; i < columns; ++i) {
        const __m128i pairs = _mm_unpacklo_epi8(load_bytes(a.at + i * a.step, count), load_bytes(b.at + i * b.step, count));
        store(cells + i * kCell, _mm256_cvtepi8_epi16(pairs));
    }
}

// Mostly one cell or none: gcc would call memset for the loop.
void zero_cells(s16* begin, s16* end) {
    if (begin == end) return;
    store(begin, _mm256_setzero_si256());
    for (begin += kCell; begin < end; begin += kCell) store(begin, _mm256_setzero_si256());
}

// Blocks [first, last) of the pair of rows a and b, each null where it is padding.
void pack_pair(const Span& span, const s8* a, const s8* b, s64 first, s64 last, s16* pair) {
    const s64 begin = span.begin(), end = span.end(), size = span.block_size();
    for (s64 block = first; block < last; ++block) {
        s16* cells = pair + block * size;
        zero_cells(cells, cells + begin * kCell);
        zero_cells(cells + end * kCell, cells + size);
    }
    const s64 whole = std::min(last, span.channels / kBlock) - first;  // blocks that have all their channels
    const s64 paired = whole - whole % 2;
    pack_whole(existing(span, a, first), existing(span, b, first), end - begin, paired, size, pair + first * size + begin * kCell);
    for (s64 block = first + paired; block < last; ++block)
        pack_few(existing(span, a, block), existing(span, b, block), end - begin, std::min(kBlock, span.channels - block * kBlock),
                 pair + block * size + begin * kCell);
}

// ------------------------------------------------------------------------------------------------------------ stencils

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
                        const bool used = tap(row, column, 2 * pair, source) >= 0 || tap(row, column, 2 * pair + 1, source) >= 0;
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

// The weight vectors of 8 channels. w points at the first of `channels` rows of taps.
template <class S>
void pack_stencil_block(const s8* w, s64 channels, s16* packed) {
    alignas(16) s16 by_tap[S::kTaps + 1][kBlock] = {};  // the last row stays zero and stands for "no tap"
    for (s64 c = 0; c < channels; ++c)
        for (int t = 0; t < S::kTaps; ++t) by_tap[t][c] = w[c * S::kTaps + t];
    const auto values = [&](int tap) { return _mm_load_si128(reinterpret_cast<const __m128i*>(by_tap[tap < 0 ? S::kTaps : tap])); };
    for (int row = 0; row < S::Rows::kOuts; ++row)
        for (int column = 0; column < S::Columns::kOuts; ++column)
            for (int pair = 0; pair < S::kPairs; ++pair)
                for (int source = 0; source < S::Columns::kSpan; ++source) {
                    const int at = S::kIndex.at[row][column][pair][source];
                    if (at < 0) continue;
                    const __m128i a = values(S::tap(row, column, 2 * pair, source));
                    const __m128i b = values(S::tap(row, column, 2 * pair + 1, source));
                    store(packed + at * kCell, _mm256_set_m128i(_mm_unpackhi_epi16(a, b), _mm_unpacklo_epi16(a, b)));
                }
}

// A row of tiles for one block of channels: pair[m] points at the first source column, out[r] at the first destination pixel.
template <class S>
void run_stencil(const s16* const* pair, const s16* weights, __m256 factor, f32* const* out, s64 tiles, s64 pixel_stride) {
    using Rows = typename S::Rows;
    using Columns = typename S::Columns;
    __m256i weight[S::kIndex.count];
    unroll<S::kIndex.count>([&](auto i) BYTEBACK_INLINE { weight[i] = load(weights + i * kCell); });
    const s16* from[S::kPairs];
    f32* to[Rows::kOuts];
    unroll<S::kPairs>([&](auto m) BYTEBACK_INLINE { from[m] = pair[m]; });
    unroll<Rows::kOuts>([&](auto row) BYTEBACK_INLINE { to[row] = out[row]; });
    for (s64 tile = 0; tile < tiles; ++tile) {
        __m256i sum[Rows::kOuts][Columns::kOuts];
        unroll<Columns::kSpan>([&](auto source) BYTEBACK_INLINE {
            unroll<S::kPairs>([&](auto m) BYTEBACK_INLINE {
                const __m256i x = load(from[m] + source * kCell);
                unroll<Rows::kOuts>([&](auto row) BYTEBACK_INLINE {
                    unroll<Columns::kOuts>([&](auto column) BYTEBACK_INLINE {
                        constexpr int at = S::kIndex.at[row][column][m][source];
                        if constexpr (at == S::kIndex.start[row][column]) sum[row][column] = multiply(x, weight[at]);
                        else if constexpr (at >= 0) sum[row][column] = multiply_add(sum[row][column], x, weight[at]);
                    });
                });
            });
        });
        unroll<Rows::kOuts>([&](auto row) BYTEBACK_INLINE {
            unroll<Columns::kOuts>([&](auto column) BYTEBACK_INLINE {
                _mm256_storeu_ps(to[row], _mm256_mul_ps(_mm256_cvtepi32_ps(sum[row][column]), factor));
                to[row] += pixel_stride;
            });
        });
        unroll<S::kPairs>([&](auto m) BYTEBACK_INLINE { from[m] += Columns::kAdvance * kCell; });
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
    return {im.from[1], im.channels, S::Columns::start(0, im.padding[1]), (tiles - 1) * S::Columns::kAdvance + S::Columns::kSpan};
}

// One thread's share of a stencil: rows of tiles, in order.
template <class S>
class StencilRun {
    using Rows = typename S::Rows;
    using Columns = typename S::Columns;

public:
    StencilRun(const Images& im, const s8* source, const s16* weights, Factor factor, f32* destination)
        : im_(im), span_(stencil_span<S>(im)), source_(source), weights_(weights), factor_(factor), destination_(destination),
          tiles_(ceil_div(im.to[1], Columns::kOuts)), streaming_(streams(im, destination)),
          memory_(scratch<ThreadScratch>(static_cast<size_t>(bytes()))),
          ring_(span_, memory_.take<s16>(PairRing<S>::kSlots * span_.size())),
          factors_(memory_.take<f32>(round_up(im.channels, 16))), spare_(memory_.take<f32>(spare_size())) {}

    void rows(s64 begin, s64 end) {
        const s64 per_frame = ceil_div(im_.to[0], Rows::kOuts);
        s64 frame = -1, sample = -1;
        for (s64 at = begin; at < end; ++at) {
            if (at / per_frame != frame) {
                frame = at / per_frame;
                ring_.forget();
            }
            if (frame / im_.frames_per_sample != sample) {
                sample = frame / im_.frames_per_sample;
                fill_factors(factor_, sample, im_.channels, factors_);
            }
            tile_row(frame, at % per_frame);
        }
        if (streaming_) _mm_sfence();
    }

private:
    // Whether the result is too large to be in cache when it is read, and made of whole cache lines.
    static bool streams(const Images& im, const f32* destination) {
        const s64 bytes = im.frames * im.to[0] * im.to[1] * im.channels * static_cast<s64>(sizeof(f32));
        return bytes >= kStreamBytes && im.channels % 16 == 0 && reinterpret_cast<uintptr_t>(destination) % 64 == 0;
    }
    s64 spare_size() const { return im_.to[1] * im_.channels; }
    s64 bytes() const {
        return Carver::bytes<s16>(PairRing<S>::kSlots * span_.size()) + Carver::bytes<f32>(round_up(im_.channels, 16)) +
               Carver::bytes<f32>(spare_size());
    }

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
    }

    // `count` tiles of one block from `tile` on, to out[r], where pixels lie pixel_stride apart.
    void run(s64 tile_row, s64 block, s64 tile, s64 count, f32* const* out, s64 pixel_stride) const {
        const s16* pair[S::kPairs];
        for (int m = 0; m < S::kPairs; ++m)
            pair[m] = ring_.memory(ring_.key(tile_row, m)) + block * span_.block_size() + tile * Columns::kAdvance * kCell;
        run_stencil<S>(pair, weights_ + block * S::kIndex.count * kCell, _mm256_load_ps(factors_ + block * kBlock), out, count,
                       pixel_stride);
    }

    f32* pixel(s64 frame, s64 row, s64 column, s64 block) const {
        return destination_ + ((frame * im_.to[0] + row) * im_.to[1] + column) * im_.channels + block * kBlock;
    }

    // Two blocks are a cache line: a few pixels of them are staged, then written past the cache.
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
                for (s64 i = 0; i < columns; ++i, line += im_.channels) {
                    _mm256_stream_ps(line, _mm256_load_ps(stage[r] + i * kLine));
                    _mm256_stream_ps(line + kBlock, _mm256_load_ps(stage[r] + i * kLine + kBlock));
                }
            }
        }
    }

    // Whole tiles of 8 channels go straight to the destination, a row below the image to a spare one.
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
        alignas(32) f32 stage[Rows::kOuts][Columns::kOuts][kBlock];
        f32* out[Rows::kOuts];
        for (int r = 0; r < Rows::kOuts; ++r) out[r] = stage[r][0];
        run(tile_row, block, tile, 1, out, kBlock);
        const s64 row = tile_row * Rows::kOuts, column = tile * Columns::kOuts;
        for (s64 r = 0; r < Rows::kOuts && row + r < im_.to[0]; ++r)
            for (s64 c = 0; c < Columns::kOuts && column + c < im_.to[1]; ++c)
                std::memcpy(pixel(frame, row + r, column + c, block), stage[r][c], static_cast<size_t>(lanes) * sizeof(f32));
    }

    const Images im_;
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
};

template <class S>
void stencil(const Images& im, const s8* source, const s8* w, Factor factor, f32* destination, int threads) {
    const s64 blocks = ceil_div(im.channels, kBlock), block_size = S::kIndex.count * kCell;
    s16* weights = reinterpret_cast<s16*>(scratch<SharedScratch>(static_cast<size_t>(blocks * block_size) * sizeof(s16)));
    for (s64 b = 0; b < blocks; ++b)
        pack_stencil_block<S>(w + b * kBlock * S::kTaps, std::min(kBlock, im.channels - b * kBlock), weights + b * block_size);
    parallel_ranges(threads, im.frames * ceil_div(im.to[0], S::Rows::kOuts), [&](int, s64 begin, s64 end) {
        StencilRun<S>(im, source, weights, factor, destination).rows(begin, end);
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
void stencil_output(const ConvShape& s, const Images& im, const s8* x, const s8* w, Factor factor, f32* y, int threads) {
    constexpr int kColumns = K == 3 ? 1 : 2;  // the weights of larger kernels do not fit the registers: use each load twice
    if (s.stride[1] == 1)
        stencil<Stencil<OutputAxis<K, 1, 2>, OutputAxis<K, 1, kColumns>>>(im, x, w, factor, y, threads);
    else
        stencil<Stencil<OutputAxis<K, 2, 2>, OutputAxis<K, 2, 1>>>(im, x, w, factor, y, threads);
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

// ----------------------------------------------------------------------------------------------------------- tap route

// How the positions of one axis meet: the source position that `destination` meets under tap t, or -1.
struct Meeting {
    bool grad_input;
    s64 stride, padding, dilation, size;  // size: of the source

    s64 source(s64 destination, s64 t) const {
        s64 at = grad_input ? destination + padding - t * dilation : destination * stride - padding + t * dilation;
        if (at < 0) return -1;
        if (grad_input) {
            if (at % stride) return -1;
            at /= stride;
        }
        return at < size ? at : -1;
    }
};

// Any kernel in three dimensions, from frames of `from` to frames of `to` pixels.
struct TapProduct {
    s64 channels;
    s64 from[3], to[3], kernel[3];
    Meeting axis[3];

    s64 from_pixels() const { return from[0] * from[1] * from[2]; }
    s64 to_pixels() const { return to[0] * to[1] * to[2]; }
    s64 taps() const { return kernel[0] * kernel[1] * kernel[2]; }
};

TapProduct tap_product(const ConvShape& s, bool grad_input) {
    TapProduct p{};
    p.channels = s.in_channels;
    for (int i = 0; i < 3; ++i) {
        p.from[i] = grad_input ? s.out[i] : s.in[i];
        p.to[i] = grad_input ? s.in[i] : s.out[i];
        p.kernel[i] = s.kernel[i];
        p.axis[i] = {grad_input, s.stride[i], s.padding[i], s.dilation[i], p.from[i]};
    }
    return p;
}

// A tap that meets the image: the channels of its pixel, and its weights.
struct Met {
    const s8* pixel;
    const s16* weight;
};

// Appends the taps that meet the image at destination (d, h, w) of the frame that `source` points at.
void meet(const TapProduct& p, const s64 (&at)[3], const s8* source, const s16* weights, s64 weight_stride, std::vector<Met>& met) {
    for (s64 t = 0; t < p.kernel[0]; ++t) {
        const s64 d = p.axis[0].source(at[0], t);
        if (d < 0) continue;
        for (s64 r = 0; r < p.kernel[1]; ++r) {
            const s64 h = p.axis[1].source(at[1], r);
            if (h < 0) continue;
            for (s64 s = 0; s < p.kernel[2]; ++s) {
                const s64 w = p.axis[2].source(at[2], s);
                if (w < 0) continue;
                met.push_back({source + ((d * p.from[1] + h) * p.from[2] + w) * p.channels,
                               weights + ((t * p.kernel[1] + r) * p.kernel[2] + s) * weight_stride});
            }
        }
    }
}

// 16 channels of a pixel. Two products fit int16 (2 * 127 * 127 = 32258), so taps are widened two at a time.
template <bool Whole>
void tap_vector(const std::vector<Met>& met, s64 c, s64 lanes, const f32* factors, f32* out) {
    const auto product = [&](const Met& m) {
        const __m128i bytes = load_bytes(m.pixel + c, Whole ? 16 : lanes);
        return _mm256_mullo_epi16(_mm256_cvtepi8_epi16(bytes), load(m.weight + c));
    };
    __m256i low = _mm256_setzero_si256(), high = low;
    for (size_t i = 0; i + 1 < met.size() + met.size() % 2; i += 2) {
        __m256i sum = product(met[i]);
        if (i + 1 < met.size()) sum = _mm256_add_epi16(sum, product(met[i + 1]));
        low = _mm256_add_epi32(low, _mm256_cvtepi16_epi32(_mm256_castsi256_si128(sum)));
        high = _mm256_add_epi32(high, _mm256_cvtepi16_epi32(_mm256_extracti128_si256(sum, 1)));
    }
    const __m256 y0 = _mm256_mul_ps(_mm256_cvtepi32_ps(low), _mm256_load_ps(factors + c));
    const __m256 y1 = _mm256_mul_ps(_mm256_cvtepi32_ps(high), _mm256_load_ps(factors + c + 8));
    if (Whole) {
        _mm256_storeu_ps(out + c, y0);
        _mm256_storeu_ps(out + c + 8, y1);
    } else {
        alignas(32) f32 values[16];
        _mm256_store_ps(values, y0);
        _mm256_store_ps(values + 8, y1);
        std::memcpy(out + c, values, static_cast<size_t>(lanes) * sizeof(f32));
    }
}

void tap_route(const TapProduct& p, s64 batch, const s8* source, const s8* w, Factor factor, f32* destination, int threads) {
    const s64 C = p.channels, padded = round_up(C, 16), taps = p.taps(), pixels = p.to_pixels();
    s16* weights = reinterpret_cast<s16*>(scratch<SharedScratch>(static_cast<size_t>(taps * padded) * sizeof(s16)));
    for (s64 t = 0; t < taps; ++t)
        for (s64 c = 0; c < padded; ++c) weights[t * padded + c] = c < C ? w[c * taps + t] : s16{0};
    parallel_ranges(threads, batch * pixels, [&](int, s64 begin, s64 end) {
        f32* factors = reinterpret_cast<f32*>(scratch<ThreadScratch>(static_cast<size_t>(padded) * sizeof(f32)));
        std::vector<Met> met;
        met.reserve(static_cast<size_t>(taps));
        s64 sample = -1;
        for (s64 pixel = begin; pixel < end; ++pixel) {
            if (pixel / pixels != sample) {
                sample = pixel / pixels;
                fill_factors(factor, sample, C, factors);
            }
            const s64 flat = pixel % pixels;
            const s64 at[3] = {flat / (p.to[1] * p.to[2]), flat / p.to[2] % p.to[1], flat % p.to[2]};
            met.clear();
            meet(p, at, source + sample * p.from_pixels() * C, weights, padded, met);
            f32* out = destination + pixel * C;
            s64 c = 0;
            for (; c + 16 <= C; c += 16) tap_vector<true>(met, c, 16, factors, out);
            if (c < C) tap_vector<false>(met, c, C - c, factors, out);
        }
    });
}

// --------------------------------------------------------------------------------------------------------- grad_weight

// A unit of work is two output rows, or a piece of them. int32 sums are laid out [block][tap][8 channels].
struct GradWeightPlan {
    s64 blocks, taps;
    s64 row_pairs;   // per output plane
    s64 piece;       // columns of a unit
    s64 pieces;      // per row pair
    s64 units;       // in all

    explicit GradWeightPlan(const ConvShape& s)
        : blocks(ceil_div(s.in_channels, kBlock)), taps(s.taps()), row_pairs(ceil_div(s.out[1], 2)),
          piece(std::min<s64>(std::max<s64>(s.out[2], 1), 256)), pieces(ceil_div(s.out[2], piece)),
          units(s.batch * s.out[0] * row_pairs * pieces) {}

    s64 sums() const { return blocks * taps * kBlock; }
};

// sum[r][c] += Σ_column g[column] * x[r][column * stride + c * dilation], the sums of a row of taps lying `sum_stride` apart.
template <int Rows, int Columns>
void accumulate(const s16* g, const s16* const* x, s64 columns, s64 stride, s64 dilation, s32* sums, s64 sum_stride) {
    __m256i sum[Rows][Columns];
    const s16* from[Rows];
    unroll<Rows>([&](auto r) BYTEBACK_INLINE { from[r] = x[r]; });
    unroll<Rows>([&](auto r) BYTEBACK_INLINE {
        unroll<Columns>([&](auto c) BYTEBACK_INLINE { sum[r][c] = load(sums + r * sum_stride + c * kBlock); });
    });
    for (s64 column = 0; column < columns; ++column) {
        const __m256i gv = load(g + column * kCell);
        unroll<Rows>([&](auto r) BYTEBACK_INLINE {
            unroll<Columns>([&](auto c) BYTEBACK_INLINE {
                const __m256i xv = load(from[r] + c * dilation * kCell);
                sum[r][c] = multiply_add(sum[r][c], gv, xv);
            });
            from[r] += stride * kCell;
        });
    }
    unroll<Rows>([&](auto r) BYTEBACK_INLINE {
        unroll<Columns>([&](auto c) BYTEBACK_INLINE { store(sums + r * sum_stride + c * kBlock, sum[r][c]); });
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
        s64 depth = 0;  // products in each int32 sum
        for (s64 at = begin; at < end; ++at) {
            if (depth + 2 * plan_.piece > kInt32Depth) {
                flush();
                depth = 0;
            }
            unit(at);
            depth += 2 * plan_.piece;
        }
        flush();
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

    void flush() {
        if (!deep_) return;
        for (s64 i = 0; i < plan_.sums(); ++i) {
            deep_[i] += sums_[i];
            sums_[i] = 0;
        }
    }

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

    // Where tap row r finds its pair of rows of x, and whether the unit before has left it there. Tap rows lie `dilation` apart:
    // counted in units of it they are distinct modulo their number.
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
    const s64 x_columns_;
    s64 x_size_ = 0;
    s16* g_pair_ = nullptr;
    s16* x_pairs_ = nullptr;
    std::vector<Place> held_;     // what each slot of x_pairs_ holds
    std::vector<Tap> tap_rows_;   // of the unit at work
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

bool depthwise_fits(const ConvShape& s) {
    return s.groups == s.in_channels && s.groups == s.out_channels && s.taps() <= kInt32Depth;
}

void depthwise_output(const ConvShape& s, const s8* x, const s8* w, Factor factor, f32* y, int threads) {
    if (s.batch * s.out_pixels() * s.in_channels == 0) return;
    if (!is_stencil(s)) return tap_route(tap_product(s, false), s.batch, x, w, factor, y, threads);
    const Images im = planes_of(s, s.in, s.out);
    if (s.kernel[1] == 3) stencil_output<3>(s, im, x, w, factor, y, threads);
    if (s.kernel[1] == 5) stencil_output<5>(s, im, x, w, factor, y, threads);
    if (s.kernel[1] == 7) stencil_output<7>(s, im, x, w, factor, y, threads);
}

void depthwise_grad_input(const ConvShape& s, const s8* g, const s8* w, Factor factor, f32* dx, int threads) {
    if (s.batch * s.in_pixels() * s.in_channels == 0) return;
    if (!is_stencil(s)) return tap_route(tap_product(s, true), s.batch, g, w, factor, dx, threads);
    const Images im = planes_of(s, s.out, s.in);
    if (s.kernel[1] == 3) stencil_grad_input<3>(s, im, g, w, factor, dx, threads);
    if (s.kernel[1] == 5) stencil_grad_input<5>(s, im, g, w, factor, dx, threads);
    if (s.kernel[1] == 7) stencil_grad_input<7>(s, im, g, w, factor, dx, threads);
}

void depthwise_grad_weight(const ConvShape& s, const s8* g, const s8* x, Factor factor, f32* dw, int threads) {
    const GradWeightPlan plan(s);
    const bool deep = s.batch * s.out_pixels() > kInt32Depth;
    const s64 count = std::max<s64>(1, std::min<s64>(threads, plan.units));
    const s64 sum_bytes = Carver::bytes<s32>(plan.sums()), deep_bytes = deep ? Carver::bytes<s64>(plan.sums()) : 0;
    Carver memory(scratch<SharedScratch>(static_cast<size_t>(count * (sum_bytes + deep_bytes))));
    std::vector<Part> parts;
    for (s64 i = 0; i < count; ++i) {
        s32* sums = memory.take<s32>(plan.sums());
        parts.push_back({sums, deep ? memory.take<s64>(plan.sums()) : nullptr, false});
    }
    parallel_ranges(threads, plan.units, [&](int thread, s64 begin, s64 end) {
        Part& part = parts[static_cast<size_t>(thread)];
        part.used = true;
        GradWeightRun(s, plan, g, x, part.sums, part.deep).units(begin, end);
    });
    write_grad_weight(s, parts, factor, dw);
}

}  // namespace byteback::avx2
