// SPDX-License-Identifier: Apache-2.0
// The end of a convolution's output, applied before it leaves the caches: norm, residual, activation, int8 (norm.h's
// `normalize`, with the same bits). A kernel that is given one hands it each piece of a row of the product, and writes no
// product of its own.
#pragma once

#include "norm.h"

namespace byteback {

struct Epilogue {
    Forward from;  // x is not read
    Outcome to;    // without a mask and without what is kept for backward: nobody trains
    void* state;
    void (*finish)(const Epilogue&, s64 row, s64 channel, s64 count, const f32* y);

    // `count` neighbouring channels of one pixel of the product, from `channel` on. For any thread of a parallel region.
    __attribute__((always_inline)) void operator()(s64 row, s64 channel, s64 count, const f32* y) const { finish(*this, row, channel, count, y); }
};

namespace avx2 {
// Calls body(epilogue, context) with the epilogue that `normalize(from, to)` is, for at most `threads` threads
// (epilogue_avx2.cpp).
Report with_epilogue(const Forward& from, const Outcome& to, int threads, void (*body)(const Epilogue&, void*), void* context);
}  // namespace avx2

}  // namespace byteback
