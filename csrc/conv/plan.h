// SPDX-License-Identifier: Apache-2.0
// The planner: decides which algorithm is used for a product of a given shape on a given path, and why.
#pragma once

#include "core/path.h"
#include "core/types.h"

namespace byteback {

enum class ProductKind { output, grad_input, grad_weight };
enum class Algorithm { direct, direct_vnni, gemm, gemm_vnni, winograd, winograd_vnni, depthwise, depthwise_vnni };

struct Plan {
    Algorithm algorithm;
    bool wants_sign;     // whether it pays to find out that no input is negative: then u8·s8 multiplies are exact
    const char* reason;  // one sentence for `byteback bench kernels --explain`
};

Plan make_plan(const ConvShape&, ProductKind, Path);
const char* name_of(Algorithm);

}  // namespace byteback
