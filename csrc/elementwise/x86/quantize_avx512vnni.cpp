// SPDX-License-Identifier: Apache-2.0
// Quantize on the AVX-512 VNNI path (quantize.h has the algorithm).
#include "core/avx512vnni.h"
#include "core/x86/vector_avx512vnni.h"
// Made of the vectors above.
#include "elementwise/vector/quantize.h"
