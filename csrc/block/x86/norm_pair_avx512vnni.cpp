// SPDX-License-Identifier: Apache-2.0
// Two int8 copies of a gradient on the AVX-512 VNNI path (norm_pair.h has the algorithm).
#include "core/x86/vector_avx512vnni.h"
// Made of the vectors above.
#include "block/vector/norm_pair.h"
