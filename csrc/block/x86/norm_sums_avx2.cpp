// SPDX-License-Identifier: Apache-2.0
// The sums per channel of norm.h on the AVX2 path (norm_sums.h has the algorithm).
#include "core/x86/vector_avx2.h"
// Made of the vectors above.
#include "block/vector/norm_sums.h"
