// SPDX-License-Identifier: Apache-2.0
// The multiply kernel of the direct convolution for AVX-512 VNNI: up to 14 pixels by 32 channels, or 28 by 16, whose sums stay
// in registers until they are written. gemm_micro_avx512vnni.h explains the offset of 128.
#pragma once

// First, because of how it includes the intrinsics.
#include "conv/gemm/x86/gemm_multiply_avx512vnni.h"

#include "conv/direct/direct_block.h"

namespace byteback {
namespace {

struct DirectMicro {
    // Of a block, in groups of `group`.
    static s64 most_pixels(s64 group, s64 panels) { return group == 7 ? 28 / panels : 24 / panels; }

    static void multiply(const DirectBlock& block);
};

template <int kGroup, int kPixel>
inline const char* pixel_at(const char* const* groups, const RowSteps& step) {
    constexpr int k = kPixel % kGroup;
    const char* base = groups[kPixel / kGroup];
    if constexpr (k == 0) return base;
    if constexpr (k == 3) return base + step.three;
    if constexpr (k == 5) return base + step.five;
    if constexpr (k == 6) return base + 2 * step.three;
    return base + k * step.one;
}

template <int kGroup, int kPixel, int kVectors>
__attribute__((always_inline)) inline void multiply_pixel(__m512i* sums, const __m512i (&b)[kVectors],
                                                          const char* const* groups, const RowSteps& step) {
    __m512i quad;
    broadcast(quad, pixel_at<kGroup, kPixel>(groups, step));
    multiply_add(sums[kPixel * kVectors], quad, b[0]);
    if constexpr (kVectors > 1) multiply_add(sums[kPixel * kVectors + 1], quad, b[1]);
}

// sums[pixel * kVectors + vector]; as multiply_rows does it, but the stretches are the same for all blocks.
template <int kGroup, int kVectors, int... kPixel>
__attribute__((always_inline)) inline void multiply_pixels(std::integer_sequence<int, kPixel...>, const DirectBlock& block,
                                                           __m512i* sums) {
    constexpr int kGroups = (static_cast<int>(sizeof...(kPixel)) + kGroup - 1) / kGroup;
    __m512i start[2];
    read(start[0], block.starts);
    if constexpr (kVectors > 1) read(start[1], block.starts + kColumns);
    ((sums[kPixel * kVectors] = start[0], sums[kPixel * kVectors + kVectors - 1] = start[kVectors - 1]), ...);
    RowSteps steps{block.pixel, 3 * block.pixel, 5 * block.pixel};
    asm("" : "+r"(steps.one), "+r"(steps.three), "+r"(steps.five));  // else the compiler makes a pointer for every pixel
    for (const TapStretch *s = block.depth, *end = s + block.stretches; s < end; ++s) {
        const char *groups[kGroups], *B = block.B + s->start;
#pragma GCC unroll 6
        for (int i = 0; i < kGroups; ++i) groups[i] = block.A[i] + s->offset;
        s64 left = s->steps;
        do {
            __m512i b[kVectors];
            read(b[0], B);
            if constexpr (kVectors > 1) read(b[1], B + block.panel);
            (multiply_pixel<kGroup, kPixel>(sums, b, groups, steps), ...);
#pragma GCC unroll 6
            for (int i = 0; i < kGroups; ++i) groups[i] += 4;
            B += 64;
        } while (--left);
    }
}

template <int kGroup, int kVectors, int kCount, int... kAt>
__attribute__((always_inline)) inline void multiply_and_write_pixels(std::integer_sequence<int, kAt...>,
                                                                     const DirectBlock& block) {
    const auto at = [&](int i) {
        const int pixel = i / kVectors;
        return block.to[pixel / kGroup] + pixel % kGroup * block.step + i % kVectors * kColumns;
    };
    if (!block.stream) (fetch_to_write(at(kAt)), ...);
    __m512i sums[kCount * kVectors];
    multiply_pixels<kGroup, kVectors>(std::make_integer_sequence<int, kCount>(), block, sums);
    const Scales<kVectors> scales(block.factors, block.vary, block.columns);
    (scales.write(kAt % kVectors, sums[kAt], at(kAt), block.stream), ...);
}

template <int kGroup, int kVectors, int kCount>
__attribute__((noinline)) void multiply_exactly(const DirectBlock& block) {
    multiply_and_write_pixels<kGroup, kVectors, kCount>(std::make_integer_sequence<int, kCount * kVectors>(), block);
}

// The counts of pixels are kEach, 2 * kEach and so on.
template <int kGroup, int kVectors, int kEach, int... kBefore>
inline void multiply_any(std::integer_sequence<int, kBefore...>, const DirectBlock& block) {
    static constexpr void (*kernels[])(const DirectBlock&) = {multiply_exactly<kGroup, kVectors, (kBefore + 1) * kEach>...};
    kernels[block.pixels / kEach - 1](block);
}

inline void DirectMicro::multiply(const DirectBlock& block) {
    if (block.group == 7 && block.panels == 2)
        multiply_any<7, 2, 1>(std::make_integer_sequence<int, 14>(), block);
    else if (block.group == 7)
        multiply_any<7, 1, 1>(std::make_integer_sequence<int, 28>(), block);
    else if (block.panels == 2)
        multiply_any<4, 2, 4>(std::make_integer_sequence<int, 3>(), block);
    else
        multiply_any<4, 1, 4>(std::make_integer_sequence<int, 6>(), block);
}

}  // namespace
}  // namespace byteback
