// SPDX-License-Identifier: Apache-2.0
// max|x| and tail counts on the AVX2 path (absmax.h has the algorithm).
#include "core/avx2.h"
#include "core/x86/vector_avx2.h"
// Made of the vectors above.
#include "elementwise/vector/absmax.h"
