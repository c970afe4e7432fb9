// SPDX-License-Identifier: Apache-2.0
// The cosine of several clips on the AVX-512 VNNI path (cosine.h has the algorithm). Tiles are turned as with AVX2.
#include "core/avx2.h"
#include "core/avx512vnni.h"
#include "core/x86/vector_avx512vnni.h"
#include "core/x86/tiles_avx2.h"
// Made of the vectors and tiles above.
#include "elementwise/vector/cosine.h"
