// SPDX-License-Identifier: Apache-2.0
// The epilogue that writes bfloat16 on the AVX2 path (epilogue_rounding.h has the algorithm).
#include "core/x86/vector_avx2.h"
// Made of the vectors above.
#include "block/vector/epilogue_rounding.h"
