// SPDX-License-Identifier: Apache-2.0
// Max pooling on the AVX-512 VNNI path (max_pool_vector.h has the algorithm).
#include "core/x86/vector_avx512vnni.h"
// Made of the vectors above.
#include "block/vector/max_pool_vector.h"
