// SPDX-License-Identifier: Apache-2.0
#include "core/path.h"

namespace byteback {

bool is_compiled(Path path) {
#ifdef BYTEBACK_AVX2
    if (path == Path::avx2) return true;
#endif
#ifdef BYTEBACK_AVX512VNNI
    if (path == Path::avx512vnni) return true;
#endif
    return path == Path::generic;
}

bool cpu_supports(Path path) {
    if (path == Path::generic) return true;
#if defined(__x86_64__) && defined(__GNUC__)
    // These ask the operating system too, whether it saves the registers.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (path == Path::avx2) return avx2;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx2 && avx512 && __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

}  // namespace byteback
