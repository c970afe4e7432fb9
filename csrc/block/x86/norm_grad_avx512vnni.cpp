// SPDX-License-Identifier: Apache-2.0
// The gradient of the fused block on the AVX-512 VNNI path (norm_grad.h has the algorithm).
#include "core/x86/vector_avx512vnni.h"
// Made of the vectors above.
#include "block/vector/norm_grad.h"
