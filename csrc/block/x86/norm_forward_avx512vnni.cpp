// SPDX-License-Identifier: Apache-2.0
// The forward passes of norm.h on the AVX-512 VNNI path (norm_forward.h has the algorithm).
#include "core/x86/vector_avx512vnni.h"
// Made of the vectors above.
#include "block/vector/norm_forward.h"
