// SPDX-License-Identifier: Apache-2.0
// Depthwise convolutions on the AVX-512 VNNI path (depthwise.h has the algorithms).
#include "core/avx512vnni.h"
#include "conv/depthwise/x86/depthwise_vector_avx512vnni.h"
// Made of the vectors above.
#include "conv/depthwise/depthwise.h"
