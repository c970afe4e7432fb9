// SPDX-License-Identifier: Apache-2.0
// Shared code of the depthwise kernels, and row pairs (see depthwise.h).
//
// For depthwise.h only. Compiled once per path, after its vectors.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "block/epilogue.h"
#include "core/parallel.h"

namespace byteback {
namespace {

constexpr s64 kTileBlocks = 32;  // blocks whose row pairs are made and used together: many, for reads that stream

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

#define BYTEBACK_ALWAYS __attribute__((always_inline))

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

struct SharedScratch;  // owned by the calling thread, read by all
struct ThreadScratch;  // each thread its own

// The factors of the channels of one sample as an array, zero beyond the last channel.
void fill_factors(Factor factor, s64 n, s64 channels, f32* out) {
    for (s64 c = 0; c < channels; ++c) out[c] = factor.at(n, c);
    for (s64 c = channels; c < round_up(channels, kLane); ++c) out[c] = 0;
}

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
    alignas(kLane) static constexpr s8 zeros[kLane] = {};
    if (!row) return {zeros, 0, 0};
    return {row + (span.first + span.begin()) * span.channels + block * kBlock, span.channels, kBlock};
}

// Whole blocks of a row pair, two at a time. Bytes are interleaved before they are widened: so the channels stay in order.
void pack_whole(Row a, Row b, s64 columns, s64 blocks, s64 block_size, s16* cells) {
    for (s64 i = 0; i < columns; ++i) {
        for (s64 block = 0; block < blocks; block += 2) {
            s16* to = cells + block * block_size + i * kCell;
            pair_two_blocks(a.at + i * a.step + block * a.block, b.at + i * b.step + block * b.block, to, to + block_size);
        }
    }
}

// One block, of which only `count` channels exist.
void pack_few(Row a, Row b, s64 columns, s64 count, s16* cells) {
    for (s64 i = 0; i < columns; ++i) pair_some(a.at + i * a.step, b.at + i * b.step, count, cells + i * kCell);
}

// Mostly one cell or none: gcc would call memset for the loop.
void zero_cells(s16* begin, s16* end) {
    if (begin == end) return;
    store(begin, zero());
    for (begin += kCell; begin < end; begin += kCell) store(begin, zero());
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
    pack_whole(existing(span, a, first), existing(span, b, first), end - begin, paired, size,
               pair + first * size + begin * kCell);
    for (s64 block = first + paired; block < last; ++block)
        pack_few(existing(span, a, block), existing(span, b, block), end - begin,
                 std::min(kBlock, span.channels - block * kBlock), pair + block * size + begin * kCell);
}

}  // namespace
}  // namespace byteback
