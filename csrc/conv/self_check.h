// SPDX-License-Identifier: Apache-2.0
// A start-up test of a path on the machine at hand: small products, compared with the generic path bit for bit, and sums as
// deep as an int32 holds, whose outcome is known.
#pragma once

#include <string>

#include "core/path.h"

namespace byteback {

// Empty if all is well, else what differs. The path must be able to run. Takes about three milliseconds.
std::string self_check(Path);

}  // namespace byteback
