// SPDX-License-Identifier: Apache-2.0
// The loop of peak_avx2.cpp and peak_avx512vnni.cpp.
#pragma once

#include <immintrin.h>

#include <utility>

#include "core/types.h"

namespace byteback {
namespace {  // compiled once per path

constexpr int kSums = 12;  // an instruction takes up to 5 cycles and two begin in each, so 10 must be under way

template <class Vector, class Step, int... kSum>
inline void repeat(std::integer_sequence<int, kSum...>, s64 rounds, Vector start, const Step& step) {
    Vector sums[kSums];
    ((sums[kSum] = start), ...);
    do (step(sums[kSum]), ...);
    while (--rounds);
}

// step(sum) for each of the sums, `rounds` times. A step is assembly: of a sum that nobody reads the compiler would leave
// nothing.
template <class Vector, class Step>
inline void repeat(s64 rounds, Vector start, const Step& step) {
    repeat(std::make_integer_sequence<int, kSums>(), rounds, start, step);
}

}  // namespace
}  // namespace byteback
