// SPDX-License-Identifier: Apache-2.0
// Threads and scratch memory, the two things that every kernel needs from the machine.
//
// The indices 0..count-1 are handed out in contiguous ranges, one per thread, so that a thread meets in one pass what it wrote
// in the pass before. With parallel_ranges which thread does what is fixed. With the others a thread that is through takes some
// of what another has not begun: a core that a neighbour slows down would else keep all waiting at every kernel's end. With one
// thread no OpenMP region is entered: libgomp can deadlock in a child of fork. Scratch memory belongs to a thread, grows to
// what was asked for and is kept for the next call, within a bound. Within a product (ScratchScope) pieces of 1 MB and more are
// the pool's, and go back to it at the end.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdlib>
#include <vector>

#include "core/aligned.h"
#include "core/pool.h"
#include "core/types.h"

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

// What is left of each thread's range.
class Shares {
public:
    Shares(int threads, s64 count) : step_((count >> 31) + 1), count_(count), ranges_(static_cast<size_t>(threads)) {
        const s64 steps = ceil_div(count, step_);
        least_ = steps / (threads * 32) + 1;
        for (s64 i = 0; i < threads; ++i)
            ranges_[static_cast<size_t>(i)].ends = pack(steps * i / threads, steps * (i + 1) / threads);
    }

    // Some indices that nobody has begun, first of all of the thread's own; false when there are none.
    bool take(int thread, s64& begin, s64& end) {
        const size_t own = static_cast<size_t>(thread);
        bool found = take(ranges_[own].ends, true, begin, end);
        for (size_t i = 1; i < ranges_.size() && !found; ++i)
            found = take(ranges_[(own + i) % ranges_.size()].ends, false, begin, end);
        return found;
    }

private:
    struct alignas(64) Range {  // a cache line each
        std::atomic<u64> ends;
    };

    static u64 pack(s64 first, s64 last) { return static_cast<u64>(first) | static_cast<u64>(last) << 32; }

    // Half of a range, from its front or its back.
    bool take(std::atomic<u64>& ends, bool front, s64& begin, s64& end) {
        for (u64 now = ends.load(std::memory_order_relaxed);;) {
            const s64 first = static_cast<s64>(now & 0xFFFFFFFFu), last = static_cast<s64>(now >> 32), left = last - first;
            if (left <= 0) return false;
            const s64 most = (left + 1) / 2 > least_ ? (left + 1) / 2 : least_, n = most < left ? most : left;
            if (!ends.compare_exchange_weak(now, front ? pack(first + n, last) : pack(first, last - n),
                                            std::memory_order_relaxed))
                continue;
            begin = (front ? first : last - n) * step_;
            end = begin + n * step_ < count_ ? begin + n * step_ : count_;
            return true;
        }
    }

    const s64 step_, count_;  // indices that are never parted; all of them
    s64 least_;
    std::vector<Range> ranges_;
};

// body(thread, next) in each thread, next(begin, end) being the way to its indices: to call until it returns false.
template <class Body>
inline void parallel_shares(int threads, s64 count, const Body& body) {
    if (threads > count) threads = static_cast<int>(count);
    if (threads <= 1) {
        bool given = count <= 0;
        body(0, [&](s64& begin, s64& end) {
            if (given) return false;
            begin = 0, end = count;
            return given = true;
        });
        return;
    }
    Shares shares(threads, count);
#pragma omp parallel num_threads(threads)
    {
        // If the runtime grants fewer threads than were asked for, they take the ranges of the others.
        const int thread = omp_get_thread_num();
        body(thread, [&](s64& begin, s64& end) { return shares.take(thread, begin, end); });
    }
}

// body(begin, end), for any thread, again and again.
template <class Body>
inline void parallel_parts(int threads, s64 count, const Body& body) {
    parallel_shares(threads, count, [&](int, const auto& next) {
        for (s64 begin, end; next(begin, end);) body(begin, end);
    });
}

template <class Body>
inline void parallel_for(int threads, s64 count, const Body& body) {
    parallel_parts(threads, count, [&](s64 begin, s64 end) {
        for (s64 i = begin; i < end; ++i) body(i);
    });
}

class Scratch {
public:
    ~Scratch() { std::free(memory_); }

    // At least `bytes` bytes, aligned to 64; the contents are whatever was there. Valid until the next call in this thread, or
    // until the product that asks for it is over.
    char* get(size_t bytes) {
        const u64 now = !kSanitized && bytes >= kSmallestBlock ? scratch_time() : 0;
        if (now) {
            if (now != borrowed_at_ || bytes > borrowed_size_) {
                borrowed_ = static_cast<char*>(scratch_lend(bytes));
                borrowed_at_ = now;
                borrowed_size_ = bytes;
            }
            return borrowed_;
        }
        if (kSanitized || bytes > size_ || (size_ > kKept && bytes < size_ / 4)) {
            const size_t size = kSanitized ? bytes : static_cast<size_t>(round_up(static_cast<s64>(bytes), 4096));
            std::free(memory_);
            memory_ = nullptr;
            size_ = 0;
            memory_ = static_cast<char*>(allocate_aligned(size));
            size_ = size;
        }
        return memory_;
    }

private:
    static constexpr size_t kKept = size_t{64} << 20;  // more than this is given back when a much smaller call follows
    char* memory_ = nullptr;
    size_t size_ = 0;
    char* borrowed_ = nullptr;  // from the pool, which takes it back itself
    size_t borrowed_size_ = 0;
    u64 borrowed_at_ = 0;
};

// One buffer per thread and per Tag, so that nested users do not share one.
template <class Tag>
inline char* scratch(size_t bytes) {
    static thread_local Scratch buffer;
    return buffer.get(bytes);
}

}  // namespace
}  // namespace byteback
