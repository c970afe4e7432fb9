// SPDX-License-Identifier: Apache-2.0
// A start-up test of a path's elementwise functions on the machine at hand: quantize, sums and the passes of the fused block on
// small tensors, compared with the generic path bit for bit. self_check.h is the same for products.
#pragma once

#include <string>

#include "core/path.h"

namespace byteback {

// Empty if all is well, else what differs. The path must be able to run; of paths without functions of their own nothing is
// asked. Takes about five milliseconds.
std::string pass_check(Path);

}  // namespace byteback
