// SPDX-License-Identifier: Apache-2.0
// Threads and scratch memory, the two things that every kernel needs from the machine.
//
// parallel_for hands out the indices 0..count-1 in contiguous ranges, one per thread, so which thread does what is fixed.
// With one thread no OpenMP region is entered: libgomp can deadlock in a child of fork.
// Scratch memory belongs to a thread, grows to what was asked for and is kept for the next call, within a bound.
#pragma once

#include <omp.h>

#include <cstdlib>
#include <new>

#include "types.h"

namespace byteback {
namespace {  // each file compiles its own copy, or the linker could hand one path's code to another

// body(thread, begin, end)
template <class Body>
inline void parallel_ranges(int threads, s64 count, const Body& body) {
    if (threads > count) threads = static_cast<int>(count);
    if (threads <= 1) {
        if (count > 0) body(0, s64{0}, count);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        // The runtime may grant fewer threads than were asked for.
        const s64 granted = omp_get_num_threads(), thread = omp_get_thread_num();
        body(static_cast<int>(thread), count * thread / granted, count * (thread + 1) / granted);
    }
}

template <class Body>
inline void parallel_for(int threads, s64 count, const Body& body) {
    parallel_ranges(threads, count, [&](int, s64 begin, s64 end) {
        for (s64 i = begin; i < end; ++i) body(i);
    });
}

class Scratch {
public:
    ~Scratch() { std::free(memory_); }

    // At least `bytes` bytes, aligned to 64; the contents are whatever was there. Valid until the next call in this thread.
    char* get(size_t bytes) {
        if (bytes > size_ || (size_ > kKept && bytes < size_ / 4)) {
            std::free(memory_);
            size_ = static_cast<size_t>(round_up(static_cast<s64>(bytes) + 64, 4096));
            memory_ = static_cast<char*>(std::aligned_alloc(64, size_));
            if (!memory_) {
                size_ = 0;
                throw std::bad_alloc();
            }
        }
        return memory_;
    }

private:
    static constexpr size_t kKept = size_t{64} << 20;  // more than this is given back when a much smaller call follows
    char* memory_ = nullptr;
    size_t size_ = 0;
};

// One buffer per thread and per Tag, so that nested users do not share one.
template <class Tag>
inline char* scratch(size_t bytes) {
    static thread_local Scratch buffer;
    return buffer.get(bytes);
}

}  // namespace
}  // namespace byteback
