// SPDX-License-Identifier: Apache-2.0
// Shared by all bindings: a tensor is passed as an address, and a function is called in the version of the given path.
#pragma once

#include <cstdint>

#include "core/path.h"

namespace byteback {
namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace
}  // namespace byteback

// BYTEBACK_CALL(name, arguments...) calls the function of this name for `path`.
#if defined(BYTEBACK_AVX512VNNI)
#define BYTEBACK_CALL(name, ...)                                                   \
    (static_cast<Path>(path) == Path::generic      ? generic::name(__VA_ARGS__)    \
     : static_cast<Path>(path) == Path::avx512vnni ? avx512vnni::name(__VA_ARGS__) \
                                                   : avx2::name(__VA_ARGS__))
#elif defined(BYTEBACK_AVX2)
#define BYTEBACK_CALL(name, ...) \
    (static_cast<Path>(path) == Path::generic ? generic::name(__VA_ARGS__) : avx2::name(__VA_ARGS__))
#else
#define BYTEBACK_CALL(name, ...) ((void)path, generic::name(__VA_ARGS__))
#endif
