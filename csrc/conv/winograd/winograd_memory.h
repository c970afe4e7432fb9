// SPDX-License-Identifier: Apache-2.0
// Helpers of the Winograd path: splits scratch memory into arrays, and reads factors.
#pragma once

#include "core/parallel.h"
#include "conv/winograd/winograd_tile.h"

namespace byteback {
namespace {

struct SharedTag;
struct ThreadTag;

// Cuts one piece of memory into aligned arrays: first add up the sizes, then hand them out.
class Arena {
public:
    template <class T>
    void reserve(T*& pointer, s64 count) {
        const s64 at = bytes_;
        bytes_ += round_up(count * static_cast<s64>(sizeof(T)), 64);
        if (base_) pointer = reinterpret_cast<T*>(base_ + at);
    }
    s64 bytes() const { return bytes_; }
    void begin(char* base) {
        base_ = base;
        bytes_ = 0;
    }

private:
    char* base_ = nullptr;
    s64 bytes_ = 0;
};

void read_factors(Factor factor, s64 row, s64 column, s64 count, f32 out[kPanel]) {
    for (s64 j = 0; j < kPanel; ++j) out[j] = j < count ? factor.at(row, column + j) : 0.0f;
}

}  // namespace
}  // namespace byteback
