// SPDX-License-Identifier: Apache-2.0
// What norm.h gathers for each channel on the AVX-512 VNNI path (norm_sums.h has the algorithm).
#include "core/x86/vector_avx512vnni.h"
// Made of the vectors above.
#include "block/vector/norm_sums.h"
