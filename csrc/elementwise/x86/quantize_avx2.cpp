// SPDX-License-Identifier: Apache-2.0
// Quantize on the AVX2 path (quantize.h has the algorithm).
#include "core/avx2.h"
#include "core/x86/vector_avx2.h"
// Made of the vectors above.
#include "elementwise/vector/quantize.h"
