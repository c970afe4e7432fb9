// SPDX-License-Identifier: Apache-2.0
// One heap for all large results. Free memory is one list of ranges: a block is cut from the smallest range that holds it, and
// joins its free neighbours when it comes back. So what a step needs at different times, in different sizes, lies in the same
// pages, and the heap is hardly larger than the most that was ever lent at once.
#include "core/pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <utility>
#include <vector>

#include "core/aligned.h"

namespace byteback {

namespace {

constexpr size_t kPage = size_t{1} << 12;
constexpr size_t kHugePage = size_t{1} << 21;
constexpr size_t kSegment = size_t{1} << 30;  // of addresses: pages that nobody has written to take no memory

constexpr Stay kStays[] = {Stay::within_step, Stay::beyond_step};

char* round_up_to(char* address, size_t step) {
    return reinterpret_cast<char*>((reinterpret_cast<size_t>(address) + step - 1) / step * step);
}
char* round_down_to(char* address, size_t step) {
    return reinterpret_cast<char*>(reinterpret_cast<size_t>(address) / step * step);
}

class Pool {
public:
    Block lend(size_t bytes, size_t limit) {
        const std::lock_guard<std::mutex> guard(lock_);
        limit_ = limit;
        return cut_block(bytes);
    }

    Block lend(size_t bytes) {
        const std::lock_guard<std::mutex> guard(lock_);
        return cut_block(bytes);
    }

    void give_back(Block block) {
        const std::lock_guard<std::mutex> guard(lock_);
        lent_ -= block.size;
        idle_ += block.size;
        put(static_cast<char*>(block.memory), {block.size, block.size, ++clock_});
        while (idle_ > limit_) drop(longest_unused());
    }

    void offer() {
#ifdef MADV_FREE
        const std::lock_guard<std::mutex> guard(lock_);
        for (auto& [begin, range] : ranges_) {
            // Whole huge pages: the system would have to split the others.
            char *first = round_up_to(begin, kHugePage), *last = round_down_to(begin + range.size, kHugePage);
            if (!range.held || last <= first || madvise(first, static_cast<size_t>(last - first), MADV_FREE)) continue;
            hold(range, std::min(range.held, range.size - static_cast<size_t>(last - first)));
        }
#endif
    }

    void release() {
        const std::lock_guard<std::mutex> guard(lock_);
        for (auto at = ranges_.begin(); at != ranges_.end(); ++at) drop(at);
        for (auto at = segments_.begin(); at != segments_.end();) {
            const auto all = ranges_.find(at->first);
            if (all == ranges_.end() || all->first + all->second.size != at->second.top) {
                ++at;
                continue;
            }
            erase(all);
            munmap(at->second.mapped, static_cast<size_t>(at->second.end - at->second.mapped));
            at = segments_.erase(at);
        }
    }

    PoolSizes sizes() {
        const std::lock_guard<std::mutex> guard(lock_);
        return {lent_, idle_};
    }

private:
    struct Range {  // of free memory
        size_t size;
        size_t held;  // bytes of it that the system cannot have
        u64 since;    // when the last part of it came back
    };
    struct Segment {
        char* mapped;
        char* top;  // from here to the end nothing was ever lent
        char* end;
    };
    using Ranges = std::map<char*, Range>;

    Block cut_block(size_t bytes) {
        const size_t size = (bytes + kPage - 1) / kPage * kPage;
        char* memory = from_range(size);
        if (!memory) memory = from_top(size);
        lent_ += size;
        return {memory, size};
    }

    char* from_range(size_t size) {
        const auto found = by_size_.lower_bound({size, nullptr});
        if (found == by_size_.end()) return nullptr;
        return cut(ranges_.find(found->second), size);
    }

    // The front of a range; the rest of it stays free.
    char* cut(Ranges::iterator at, size_t size) {
        char* begin = at->first;
        Range range = at->second;
        erase(at);
        const size_t held = std::min(range.held, size);
        idle_ -= held;
        range.size -= size;
        range.held -= held;
        if (range.size) insert(begin + size, range);
        return begin;
    }

    // Memory that was not in use yet, behind the last free range of a segment where that lies at its top.
    char* from_top(size_t size) {
        for (auto& [begin, segment] : segments_) {
            auto last = ranges_.lower_bound(segment.top);
            const bool ends_free = last != ranges_.begin() && (--last, last->first + last->second.size == segment.top);
            const size_t there = ends_free ? last->second.size : 0;
            if (static_cast<size_t>(segment.end - segment.top) + there < size) continue;
            char* memory = segment.top - there;
            if (ends_free) cut(last, there);
            segment.top = memory + size;
            return memory;
        }
        Segment segment = map(size);
        char* begin = round_up_to(segment.mapped, kHugePage);
        segment.top = begin + size;
        segments_.emplace(begin, segment);
        return begin;
    }

    // Private to this process: a forked child writes to copies of its own. In huge pages where the system has them.
    static Segment map(size_t size) {
        for (const size_t wanted : {std::max(size, kSegment), size}) {
            const size_t bytes = wanted + kHugePage;
            void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (memory == MAP_FAILED) continue;
#ifdef MADV_HUGEPAGE
            (void)madvise(memory, bytes, MADV_HUGEPAGE);
#endif
            return {static_cast<char*>(memory), nullptr, static_cast<char*>(memory) + bytes};
        }
        throw std::bad_alloc();
    }

    // Adds a range and joins it with its neighbours in the same segment.
    void put(char* begin, Range range) {
        const auto next = ranges_.find(begin + range.size);
        if (next != ranges_.end() && !segments_.count(next->first)) {
            range = {range.size + next->second.size, range.held + next->second.held, range.since};
            erase(next);
        }
        const auto after = ranges_.lower_bound(begin);
        if (after != ranges_.begin() && !segments_.count(begin)) {
            const auto before = std::prev(after);
            if (before->first + before->second.size == begin) {
                begin = before->first;
                range = {range.size + before->second.size, range.held + before->second.held, range.since};
                erase(before);
            }
        }
        insert(begin, range);
    }

    void insert(char* begin, Range range) {
        ranges_.emplace(begin, range);
        by_size_.insert({range.size, begin});
    }

    void erase(Ranges::iterator at) {
        by_size_.erase({at->second.size, at->first});
        ranges_.erase(at);
    }

    void hold(Range& range, size_t bytes) {
        idle_ -= range.held - bytes;
        range.held = bytes;
    }

    // Gives the pages of a range back to the system; its addresses stay.
    void drop(Ranges::iterator at) {
        madvise(at->first, at->second.size, MADV_DONTNEED);
        hold(at->second, 0);
    }

    Ranges::iterator longest_unused() {
        auto oldest = ranges_.end();
        for (auto at = ranges_.begin(); at != ranges_.end(); ++at)
            if (at->second.held && (oldest == ranges_.end() || at->second.since < oldest->second.since)) oldest = at;
        return oldest;
    }

    std::mutex lock_;
    std::map<char*, Segment> segments_;           // by their first address
    Ranges ranges_;                               // by their first address
    std::set<std::pair<size_t, char*>> by_size_;  // the same ones
    size_t lent_ = 0, idle_ = 0;                  // idle_: what all ranges hold
    size_t limit_ = std::numeric_limits<size_t>::max();
    u64 clock_ = 0;
};

// Never destroyed: tensors may outlive everything else when a process ends.
Pool& pool(Stay stay) {
    static Pool* all = new Pool[2];
    return all[static_cast<size_t>(stay)];
}

// What products have borrowed.
class Borrowed {
public:
    void begin() {
        const std::lock_guard<std::mutex> guard(lock_);
        if (running_++ == 0) now_ = ++count_;
    }

    void end() {
        const std::lock_guard<std::mutex> guard(lock_);
        if (--running_) return;
        now_ = 0;
        for (const Block block : blocks_) pool(block.stay).give_back(block);
        blocks_.clear();
    }

    void* lend(size_t bytes) {
        const Block block = pool(Stay::within_step).lend(bytes);
        const std::lock_guard<std::mutex> guard(lock_);
        blocks_.push_back(block);
        return block.memory;
    }

    u64 now() const { return now_.load(std::memory_order_relaxed); }

private:
    std::mutex lock_;
    std::vector<Block> blocks_;
    int running_ = 0;
    u64 count_ = 0;
    std::atomic<u64> now_{0};
};

Borrowed& borrowed() {
    static Borrowed& all = *new Borrowed;
    return all;
}

}  // namespace

Block pool_lend(size_t bytes, size_t limit, Stay stay) {
    if (kSanitized || bytes < kSmallestBlock) return {allocate_aligned(bytes), 0};
    Block block = pool(stay).lend(bytes, limit);
    block.stay = stay;
    return block;
}

void pool_give_back(Block block) {
    if (block.size) return pool(block.stay).give_back(block);
    std::free(block.memory);
}

void pool_offer() {
    for (const Stay stay : kStays) pool(stay).offer();
}

void pool_release() {
    for (const Stay stay : kStays) pool(stay).release();
}

PoolSizes pool_sizes() {
    PoolSizes all{0, 0};
    for (const Stay stay : kStays) {
        const PoolSizes own = pool(stay).sizes();
        all = {all.lent + own.lent, all.idle + own.idle};
    }
    return all;
}

ScratchScope::ScratchScope() { borrowed().begin(); }
ScratchScope::~ScratchScope() { borrowed().end(); }
u64 scratch_time() { return borrowed().now(); }
void* scratch_lend(size_t bytes) { return borrowed().lend(bytes); }

}  // namespace byteback
