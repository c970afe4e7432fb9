// SPDX-License-Identifier: Apache-2.0
// Fetches what a pass in the order of memory will read: the hardware alone looks too few lines ahead to keep memory busy.
// Compiled once per path, behind its vectors.
#pragma once

#include "block/norm.h"

namespace byteback::BYTEBACK_PATH {

namespace {

constexpr s64 kFetchAhead = 2048;  // elements

// A block's elements, further on. May lie behind the end: this never faults.
template <class T>
BYTEBACK_INLINE void fetch_ahead(const T* block) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(block) + kFetchAhead * sizeof(T);
    for (size_t byte = 0; byte < kBlock * sizeof(T); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(at + byte), 0, 2);
}

BYTEBACK_INLINE void fetch_stored_ahead(const void* from, Stored kind, s64 at) {
    kind == Stored::bf16 ? fetch_ahead(static_cast<const u16*>(from) + at) : fetch_ahead(static_cast<const f32*>(from) + at);
}

template <Stored stored>
BYTEBACK_INLINE void fetch_kept_ahead(const Kept& x, s64 at) {
    if constexpr (stored == Stored::f32) fetch_ahead(static_cast<const f32*>(x.values) + at);
    if constexpr (stored == Stored::bf16) fetch_ahead(static_cast<const u16*>(x.values) + at);
    if constexpr (stored == Stored::s8) fetch_ahead(static_cast<const s8*>(x.values) + at);
}

}  // namespace

}  // namespace byteback::BYTEBACK_PATH
