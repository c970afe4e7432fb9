// SPDX-License-Identifier: Apache-2.0
#include "path.h"

namespace byteback {

bool is_compiled(Path path) {
#ifdef BYTEBACK_AVX2
    return path == Path::generic || path == Path::avx2;
#else
    return path == Path::generic;
#endif
}

bool cpu_supports(Path path) {
    if (path == Path::generic) return true;
#if defined(__x86_64__) && defined(__GNUC__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

}  // namespace byteback
