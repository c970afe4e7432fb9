// SPDX-License-Identifier: Apache-2.0
// Memory aligned to 64 bytes: what the pool lends in small pieces, and what kernels work in.
//
// In the build of `make sanitize` (BYTEBACK_SANITIZE) each piece is one of malloc's with exactly as many bytes as were asked
// for, and nothing is used again: only then does the sanitizer see an access beyond the end, or one after the piece was given
// back.
#pragma once

#include <cstdlib>
#include <new>

namespace byteback {
namespace {  // each file compiles its own copy, or the linker could hand one path's code to another

#ifdef BYTEBACK_SANITIZE
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// std::free takes it back.
inline void* allocate_aligned(size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, bytes ? bytes : 1)) throw std::bad_alloc();
    return memory;
}

}  // namespace
}  // namespace byteback
