// SPDX-License-Identifier: Apache-2.0
// Blocks of memory that are used again (src/byteback/ops/pool.py says why). A block is lent once at a time; any thread may
// lend and give back, with Python's lock or without.
#pragma once

#include <cstddef>

#include "core/types.h"

namespace byteback {

// How long a block will be needed: within a step, or beyond its end. Blocks of either kind lie apart: a few that stay among
// many that come and go would leave free ranges too short for the next large result.
enum class Stay : u8 { within_step, beyond_step };

struct Block {
    void* memory;
    size_t size;  // of the whole block, at least what was asked for; 0: a small one, which malloc made
    Stay stay = Stay::within_step;
};

struct PoolSizes {
    size_t lent;
    size_t idle;  // lying about and known to the system as in use
};

// Smaller blocks are left to malloc, which keeps them itself.
constexpr size_t kSmallestBlock = size_t{1} << 20;

// A block of at least `bytes` bytes, aligned to 64, its contents whatever was there. From now on at most `limit` bytes of
// either kind lie idle: beyond them the longest unused ranges go back to the system.
Block pool_lend(size_t bytes, size_t limit, Stay stay = Stay::within_step);
void pool_give_back(Block block);

// Leaves the pages of idle blocks to the system, which takes them when memory is short; until then they are used again.
void pool_offer();
// Gives idle blocks back to the system.
void pool_release();
PoolSizes pool_sizes();

// Large scratch memory of kernels (parallel.h) is lent by the pool for as long as a product runs, and lies idle with the rest
// between products. Products that run at the same time, in several threads, return theirs together.
class ScratchScope {
public:
    ScratchScope();
    ~ScratchScope();
    ScratchScope(const ScratchScope&) = delete;
    ScratchScope& operator=(const ScratchScope&) = delete;
};

// A number for the time from the first of these products to the end of the last; 0: no product runs.
u64 scratch_time();
// Valid until the time is over.
void* scratch_lend(size_t bytes);

}  // namespace byteback
