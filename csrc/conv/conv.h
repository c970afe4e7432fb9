// SPDX-License-Identifier: Apache-2.0
// The interface of the three products. They call the kernel that the planner chooses.
#pragma once

#include "block/epilogue.h"
#include "core/path.h"
#include "core/types.h"

namespace byteback {

// Each returns the name of the kernel that ran, such as "avx2/winograd".
const char* conv_output(Path, const ConvShape&, const s8* x, const s8* w, Factor, f32* y, int threads);
const char* conv_grad_input(Path, const ConvShape&, const s8* g, const s8* w, Factor, f32* dx, int threads);
// dx = grad_input + a gradient that waits; its g may be null, for none. dx is f32, or the sum rounded to bf16.
const char* conv_grad_input_sum(Path, const ConvShape&, const s8* g, const s8* w, Factor, const Waiting&, void* dx, Stored kind,
                                int threads);
const char* conv_grad_weight(Path, const ConvShape&, const s8* g, const s8* x, Factor, f32* dw, int threads);

// Computes the output and passes it to an epilogue. Returns null, and does nothing, if no kernel of the path supports that.
const char* conv_with_epilogue(Path, const ConvShape&, const s8* x, const s8* w, Factor, const Epilogue&, int threads);

// Computes the output, rounded to bfloat16.
const char* conv_output_bf16(Path, const ConvShape&, const s8* x, const s8* w, Factor, bf16* y, int threads);

// Computes the output, as f32 or bf16, and its statistics per channel in one pass. Returns null, and does nothing, if no kernel
// of the path supports that, or if the output is so small that reading it again is as fast.
const char* conv_with_stats(Path, const ConvShape&, const s8* x, const s8* w, Factor, void* y, Stored, const Statistics&,
                            int threads);

}  // namespace byteback
