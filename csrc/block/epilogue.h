// SPDX-License-Identifier: Apache-2.0
// Epilogues process the output of a convolution while it is in the caches. A kernel with an epilogue passes pieces of the rows
// of the product to it, and does not write the product itself. There are four:
//   with_epilogue    norm, residual, activation, int8 (`normalize` of norm.h, with the same bits), for predictions
//   with_statistics  writes the rows and computes statistics per channel (`channel_stats`, with the same bits), for training
//   with_rounding    writes the rows as bfloat16
//   with_waiting     adds a gradient, if there is one (`add_waiting`, with the same bits), and writes the sum as floats or as
//                    bfloat16, for grad_input
#pragma once

#include "block/norm.h"

namespace byteback {

struct Epilogue {
    Forward from;  // x is not read
    Outcome to;    // without a mask and without what is kept for backward; output is f32
    void* state;
    bool in_order;  // wants whole rows, and those of one piece to follow those of the piece before as often as possible
    void (*finish)(const Epilogue&, s64 row, s64 rows, s64 channel, s64 count, const f32* y);

    // `count` neighbouring channels, from `channel` on, of `rows` neighbouring pixels of the product, which lie side by side in
    // y. For any thread of a parallel region.
    __attribute__((always_inline)) void operator()(s64 row, s64 rows, s64 channel, s64 count, const f32* y) const {
        finish(*this, row, rows, channel, count, y);
    }
};

// Per channel Σ, Σ², min and max of an output.
struct Statistics {
    f64 *total, *squares;
    f32 *low, *high;
};

namespace avx2 {
// Each calls body(epilogue, context), for at most `threads` threads.
Report with_epilogue(const Forward& from, const Outcome& to, int threads, void (*body)(const Epilogue&, void*), void* context);
// y is f32 or bf16; the statistics are those of what is written.
void with_statistics(s64 rows, s64 channels, void* y, Stored kind, const Statistics&, int threads,
                     void (*body)(const Epilogue&, void*), void* context);
void with_rounding(s64 channels, bf16* y, void (*body)(const Epilogue&, void*), void* context);
// dx is f32 or bf16; the g of Waiting may be null.
void with_waiting(s64 rows, s64 channels, const Waiting&, void* dx, Stored kind, void (*body)(const Epilogue&, void*),
                  void* context);
}  // namespace avx2

namespace avx512vnni {
void with_statistics(s64 rows, s64 channels, void* y, Stored kind, const Statistics&, int threads,
                     void (*body)(const Epilogue&, void*), void* context);
}  // namespace avx512vnni

}  // namespace byteback
