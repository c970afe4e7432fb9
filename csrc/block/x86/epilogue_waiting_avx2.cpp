// SPDX-License-Identifier: Apache-2.0
// The epilogue that adds a gradient on the AVX2 path (epilogue_waiting.h has the algorithm).
#include "core/x86/vector_avx2.h"
// Made of the vectors above.
#include "block/vector/epilogue_waiting.h"
