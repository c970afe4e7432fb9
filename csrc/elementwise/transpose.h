// SPDX-License-Identifier: Apache-2.0
// Shared by the transposes of all paths: matrices are split into blocks that fit in the cache, and threads process blocks.
//
// Within a block both sides are read and written in whole cache lines, whatever the order of its elements.
// In an anonymous namespace: each path compiles its own copy.
#pragma once

#include <algorithm>

#include "core/elementwise.h"
#include "core/parallel.h"

namespace byteback {
namespace {

constexpr s64 kTransposeBlock = 64;            // rows and columns of a block
constexpr s64 kTransposeSmall = s64{1} << 15;  // bytes below which a second thread costs more than it saves

// The place of a block: `rows` x `columns` elements from `from`, whose rows lie `from_stride` apart, to `to`.
template <class T>
struct TransposeBlock {
    const T* from;
    T* to;
    s64 from_stride, to_stride;
    s64 rows, columns;

    TransposeBlock part(s64 row, s64 column, s64 some_rows, s64 some_columns) const {
        return {
            from + row * from_stride + column, to + column * to_stride + row, from_stride, to_stride, some_rows, some_columns};
    }
};

// The textbook, and the ragged ends of everything else. The longer side is walked inside.
template <class T>
void transpose_plainly(const TransposeBlock<T>& b) {
    if (b.rows < b.columns)
        for (s64 r = 0; r < b.rows; ++r)
            for (s64 c = 0; c < b.columns; ++c) b.to[c * b.to_stride + r] = b.from[r * b.from_stride + c];
    else
        for (s64 c = 0; c < b.columns; ++c)
            for (s64 r = 0; r < b.rows; ++r) b.to[c * b.to_stride + r] = b.from[r * b.from_stride + c];
}

// each(block) for all blocks of all matrices.
template <class T, class Each>
void for_each_block(const Matrices& m, const T* from, T* to, int threads, const Each& each) {
    const s64 down = ceil_div(m.rows, kTransposeBlock), across = ceil_div(m.columns, kTransposeBlock);
    const s64 size = m.rows * m.columns;
    if (m.batch * size * static_cast<s64>(sizeof(T)) < kTransposeSmall) threads = 1;
    parallel_for(threads, m.batch * down * across, [&](s64 index) {
        const s64 i = index / across % down * kTransposeBlock, j = index % across * kTransposeBlock, n = index / across / down;
        const TransposeBlock<T> whole{from + n * size, to + n * size, m.columns, m.rows, m.rows, m.columns};
        each(whole.part(i, j, std::min(kTransposeBlock, m.rows - i), std::min(kTransposeBlock, m.columns - j)));
    });
}

}  // namespace
}  // namespace byteback
