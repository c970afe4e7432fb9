// SPDX-License-Identifier: Apache-2.0
// Tests a path at start-up on the current machine: small products, compared with the generic path bit for bit, and the longest
// sums that fit in int32, whose results are known.
#pragma once

#include <string>

#include "core/path.h"

namespace byteback {

// Returns an empty string if all results are correct, else what differs. The path must be able to run. Takes about 3 ms.
std::string self_check(Path);

}  // namespace byteback
