// SPDX-License-Identifier: Apache-2.0
// The three products as the outside sees them: they ask the planner and call the kernel that it chose.
#pragma once

#include "block/epilogue.h"
#include "core/path.h"
#include "core/types.h"

namespace byteback {

// Each returns the name of the kernel that served, such as "avx2/winograd".
const char* conv_output(Path, const ConvShape&, const s8* x, const s8* w, Factor, f32* y, int threads);
const char* conv_grad_input(Path, const ConvShape&, const s8* g, const s8* w, Factor, f32* dx, int threads);
const char* conv_grad_weight(Path, const ConvShape&, const s8* g, const s8* x, Factor, f32* dw, int threads);

// The output in the hands of an epilogue; null where no kernel of the path can do that, and then nothing was done.
const char* conv_with_epilogue(Path, const ConvShape&, const s8* x, const s8* w, Factor, const Epilogue&, int threads);

// The output and its statistics for each channel in one go. Null where no kernel of the path can do that, or where the output
// is so small that it is as well read again; then nothing was done.
const char* conv_with_stats(Path, const ConvShape&, const s8* x, const s8* w, Factor, f32* y, const Statistics&, int threads);

}  // namespace byteback
