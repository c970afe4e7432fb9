// SPDX-License-Identifier: Apache-2.0
// Converts between memory formats, block by block.
#include "core/generic.h"
#include "elementwise/transpose.h"

namespace byteback::generic {

void transpose(const Matrices& m, const u8* from, u8* to, int threads) {
    for_each_block(m, from, to, threads, [](const TransposeBlock<u8>& block) { transpose_plainly(block); });
}

void transpose(const Matrices& m, const u32* from, u32* to, int threads) {
    for_each_block(m, from, to, threads, [](const TransposeBlock<u32>& block) { transpose_plainly(block); });
}

}  // namespace byteback::generic
