// SPDX-License-Identifier: Apache-2.0
// The cosine of several clips on the AVX2 path (cosine.h has the algorithm).
#include "core/avx2.h"
#include "core/x86/vector_avx2.h"
#include "core/x86/tiles_avx2.h"
// Made of the vectors and tiles above.
#include "elementwise/vector/cosine.h"
