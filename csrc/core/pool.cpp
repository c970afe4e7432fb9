// SPDX-License-Identifier: Apache-2.0
#include "core/pool.h"

#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

#include "core/aligned.h"

namespace byteback {

namespace {

class Pool {
public:
    Block lend(size_t bytes, size_t limit) {
        const size_t size = rounded(bytes);
        {
            const std::lock_guard<std::mutex> guard(lock_);
            limit_ = limit;
            lent_ += size;
            Shelf& shelf = shelves_[size];
            shelf.asked = ++clock_;
            if (!shelf.blocks.empty()) {
                const Idle block = shelf.blocks.back();
                shelf.blocks.pop_back();
                forget(block, size);
                return {block.memory, size};
            }
        }
        return {map(size), size};
    }

    void give_back(Block block) {
        const std::lock_guard<std::mutex> guard(lock_);
        lent_ -= block.size;
        idle_ += block.size;
        shelves_[block.size].blocks.push_back({block.memory, false});
        if (idle_ > limit_) shrink(limit_);
    }

    void offer() {
#ifdef MADV_FREE
        const std::lock_guard<std::mutex> guard(lock_);
        for (auto& [size, shelf] : shelves_)
            for (Idle& block : shelf.blocks)
                if (!block.offered && madvise(block.memory, size, MADV_FREE) == 0) {
                    block.offered = true;
                    offered_ += size;
                }
#endif
    }

    void release() {
        const std::lock_guard<std::mutex> guard(lock_);
        shrink(0);
    }

    PoolSizes sizes() {
        const std::lock_guard<std::mutex> guard(lock_);
        return {lent_, idle_ - offered_};
    }

private:
    struct Idle {
        void* memory;
        bool offered;
    };
    struct Shelf {
        std::vector<Idle> blocks;  // that nobody uses now, all of one size
        u64 asked = 0;             // when this size was asked for last
    };

    // At most an eighth more, so that images of varying sizes share blocks.
    static size_t rounded(size_t size) {
        size_t step = size_t{1} << 16;
        while (step * 16 <= size) step *= 2;
        return (size + step - 1) / step * step;
    }

    // Private to this process: a forked child writes to copies of its own. In huge pages where the system has them.
    void* map(size_t size) {
        for (int attempt = 0; attempt < 2; ++attempt) {
            void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (memory != MAP_FAILED) {
#ifdef MADV_HUGEPAGE
                (void)madvise(memory, size, MADV_HUGEPAGE);
#endif
                return memory;
            }
            release();  // there may be enough in other sizes
        }
        const std::lock_guard<std::mutex> guard(lock_);
        lent_ -= size;
        throw std::bad_alloc();
    }

    void forget(const Idle& block, size_t size) {
        idle_ -= size;
        if (block.offered) offered_ -= size;
    }

    // Unmaps idle blocks until `target` bytes are left, long unused sizes first.
    void shrink(size_t target) {
        while (idle_ > target) {
            auto oldest = shelves_.end();
            for (auto at = shelves_.begin(); at != shelves_.end(); ++at)
                if (!at->second.blocks.empty() && (oldest == shelves_.end() || at->second.asked < oldest->second.asked))
                    oldest = at;
            std::vector<Idle>& blocks = oldest->second.blocks;
            while (!blocks.empty() && idle_ > target) {
                munmap(blocks.back().memory, oldest->first);
                forget(blocks.back(), oldest->first);
                blocks.pop_back();
            }
        }
        for (auto at = shelves_.begin(); target == 0 && at != shelves_.end();)
            at = at->second.blocks.empty() ? shelves_.erase(at) : ++at;
    }

    std::mutex lock_;
    std::unordered_map<size_t, Shelf> shelves_;  // by size
    size_t lent_ = 0, idle_ = 0, offered_ = 0, limit_ = 0;
    u64 clock_ = 0;
};

// Never destroyed: tensors may outlive everything else when a process ends.
Pool& pool() {
    static Pool& all = *new Pool;
    return all;
}

}  // namespace

Block pool_lend(size_t bytes, size_t limit) {
    if (!kSanitized && bytes >= kSmallestBlock) return pool().lend(bytes, limit);
    return {allocate_aligned(bytes), 0};
}

void pool_give_back(Block block) {
    if (block.size) return pool().give_back(block);
    std::free(block.memory);
}

void pool_offer() { pool().offer(); }
void pool_release() { pool().release(); }
PoolSizes pool_sizes() { return pool().sizes(); }

}  // namespace byteback
