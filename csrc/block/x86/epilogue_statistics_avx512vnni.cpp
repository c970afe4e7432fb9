// SPDX-License-Identifier: Apache-2.0
// The epilogue that computes statistics on the AVX-512 VNNI path (epilogue_statistics.h has the algorithm).
#include "core/x86/vector_avx512vnni.h"
// Made of the vectors above.
#include "block/vector/epilogue_statistics.h"
