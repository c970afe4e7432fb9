// SPDX-License-Identifier: Apache-2.0
// Rows of a product, written as bfloat16. Compiled once, behind the vectors of AVX2.
#pragma once

#include "block/epilogue.h"
#include "block/vector/norm_vector.h"

namespace byteback::BYTEBACK_PATH {

namespace {

void round_piece(const Epilogue& all, s64 row, s64 rows, s64 channel, s64 count, const f32* y) {
    const s64 channels = all.from.channels;
    bf16* to = static_cast<bf16*>(all.to.output) + row * channels + channel;
    if (count == channels) return copy_reals(to, y, rows * count);
    for (s64 i = 0; i < rows; ++i) copy_reals(to + i * channels, y + i * count, count);
}

}  // namespace

void with_rounding(s64 channels, bf16* y, void (*body)(const Epilogue&, void*), void* context) {
    Epilogue epilogue{};
    epilogue.from.channels = channels, epilogue.to.output = y, epilogue.to.pitch = channels;
    epilogue.finish = &round_piece;
    body(epilogue, context);
}

}  // namespace byteback::BYTEBACK_PATH
