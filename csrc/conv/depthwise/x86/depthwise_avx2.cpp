// SPDX-License-Identifier: Apache-2.0
// Depthwise convolutions on the AVX2 path (depthwise.h has the algorithms).
#include "core/avx2.h"
#include "conv/depthwise/x86/depthwise_vector_avx2.h"
// Made of the vectors above.
#include "conv/depthwise/depthwise.h"
