// SPDX-License-Identifier: Apache-2.0
// Converts between memory formats: tiles of 8x8 words or 16x16 bytes are transposed in registers (tiles_avx2.h).
//
// Results that are too large for the cache are written past it if whole lines are written.
#include <immintrin.h>

#include "core/avx2.h"
#include "elementwise/transpose.h"
#include "core/x86/tiles_avx2.h"

namespace byteback::avx2 {

namespace {

constexpr s64 kStreamBytes = s64{16} << 20;  // as in depthwise_pairs.h
constexpr s64 kLineWords = 16;

struct Words {
    static constexpr s64 kTile = 8;
    using T = u32;

    // Moves alone: the words are taken for floats and keep their bits.
    static void turn(const u32* from, s64 from_stride, __m256 (&v)[8]) {
        load_turned8(reinterpret_cast<const f32*>(from), from_stride, v);
    }
    static void tile(const u32* from, s64 from_stride, u32* to, s64 to_stride) {
        transpose8(reinterpret_cast<const f32*>(from), from_stride, reinterpret_cast<f32*>(to), to_stride);
    }
};

struct Bytes {
    static constexpr s64 kTile = 16;
    using T = u8;

    static void tile(const u8* from, s64 from_stride, u8* to, s64 to_stride) { transpose16(from, from_stride, to, to_stride); }
};

// The part of a block that no whole tile covers.
template <class T>
void ragged(const TransposeBlock<T>& b, s64 rows, s64 columns) {
    if (columns < b.columns) transpose_plainly(b.part(0, columns, b.rows, b.columns - columns));
    if (rows < b.rows && columns > 0) transpose_plainly(b.part(rows, 0, b.rows - rows, columns));
}

template <class Kind>
void turn_block(const TransposeBlock<typename Kind::T>& b) {
    const s64 rows = b.rows - b.rows % Kind::kTile, columns = b.columns - b.columns % Kind::kTile;
    for (s64 c = 0; c < columns; c += Kind::kTile)
        for (s64 r = 0; r < rows; r += Kind::kTile)
            Kind::tile(b.from + r * b.from_stride + c, b.from_stride, b.to + c * b.to_stride + r, b.to_stride);
    ragged(b, rows, columns);
}

// Two tiles below each other make whole lines of the result.
void stream_block(const TransposeBlock<u32>& b) {
    const s64 rows = b.rows - b.rows % kLineWords, columns = b.columns - b.columns % Words::kTile;
    for (s64 c = 0; c < columns; c += Words::kTile)
        for (s64 r = 0; r < rows; r += kLineWords) {
            __m256 left[8], right[8];
            const u32* from = b.from + r * b.from_stride + c;
            Words::turn(from, b.from_stride, left);
            Words::turn(from + Words::kTile * b.from_stride, b.from_stride, right);
            for (int i = 0; i < 8; ++i) {
                f32* to = reinterpret_cast<f32*>(b.to + (c + i) * b.to_stride + r);
                _mm256_stream_ps(to, left[i]);
                _mm256_stream_ps(to + 8, right[i]);
            }
        }
    ragged(b, rows, columns);
    _mm_sfence();
}

}  // namespace

void transpose(const Matrices& m, const u8* from, u8* to, int threads) {
    for_each_block(m, from, to, threads, [](const TransposeBlock<u8>& block) { turn_block<Bytes>(block); });
}

void transpose(const Matrices& m, const u32* from, u32* to, int threads) {
    const bool lines = m.rows % kLineWords == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0;
    const bool large = m.batch * m.rows * m.columns * static_cast<s64>(sizeof(u32)) >= kStreamBytes;
    if (lines && large)
        for_each_block(m, from, to, threads, [](const TransposeBlock<u32>& block) { stream_block(block); });
    else
        for_each_block(m, from, to, threads, [](const TransposeBlock<u32>& block) { turn_block<Words>(block); });
}

}  // namespace byteback::avx2
