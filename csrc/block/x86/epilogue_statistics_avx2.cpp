// SPDX-License-Identifier: Apache-2.0
// The epilogue that computes statistics on the AVX2 path (epilogue_statistics.h has the algorithm).
#include "core/x86/vector_avx2.h"
// Made of the vectors above.
#include "block/vector/epilogue_statistics.h"
