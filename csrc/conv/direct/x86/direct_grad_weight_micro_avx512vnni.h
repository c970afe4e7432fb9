// SPDX-License-Identifier: Apache-2.0
// What direct_grad_weight.h needs of AVX-512 VNNI: packing by quads of pixels, and blocks of 8 filters by up to 3 vectors.
//
// A step of a block is a load for each vector of x, and for each filter of g a load that broadcasts 4 bytes: 11 loads for 24
// multiplies.
#pragma once

// First, because of how it includes the intrinsics.
#include "conv/gemm/x86/gemm_multiply_avx512vnni.h"

#include "conv/direct/direct_grad_weight.h"

namespace byteback {
namespace {

struct DirectQuads {
    static constexpr int kZero = 0x80;  // the byte of a pixel that is 0

    // to = from + 128, any number of bytes.
    static void copy(char* to, const s8* from, s64 n) {
        const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
        for (; n >= 64; n -= 64, to += 64, from += 64)
            _mm512_storeu_si512(to, _mm512_xor_si512(_mm512_loadu_si512(from), flip));
        if (n == 0) return;
        const __mmask64 there = (__mmask64{1} << n) - 1;
        _mm512_mask_storeu_epi8(to, there, _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, from), flip));
    }

    // 16 channels of 4 pixels: [channels by four][pixel][4 channels] -> [channel][pixel].
    static __m512i turn(__m512i by_four) {
        return _mm512_shuffle_epi8(by_four,
                                   _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
    }
    static __m512i load_pair(const char* from, s64 pixel) {
        const auto half = [](const char* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); };
        return _mm512_inserti64x4(_mm512_castsi256_si512(half(from)), half(from + pixel), 1);
    }
    static __m128i sixteen(const char* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

    // 32 channels of 4 pixels as two vectors.
    static void load_two(const char* from, s64 pixel, __m512i (&to)[2]) {
        const __m512i a = load_pair(from, pixel), b = load_pair(from + 2 * pixel, pixel);
        const __m512i low = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
        const __m512i high = _mm512_setr_epi32(4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31);
        to[0] = turn(_mm512_permutex2var_epi32(a, low, b));
        to[1] = turn(_mm512_permutex2var_epi32(a, high, b));
    }
    // 16 channels of 4 pixels, which may be side by side.
    template <bool kDense>
    static __m512i load_one(const char* from, s64 pixel) {
        __m512i v;
        if constexpr (kDense) {
            v = _mm512_loadu_si512(from);
        } else {
            v = _mm512_inserti32x4(_mm512_castsi128_si512(sixteen(from)), sixteen(from + pixel), 1);
            v = _mm512_inserti32x4(v, sixteen(from + 2 * pixel), 2);
            v = _mm512_inserti32x4(v, sixteen(from + 3 * pixel), 3);
        }
        return turn(_mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v));
    }

    // A row of quads whose pixels are `pixel` bytes apart, by panels of 16 channels.
    static void pack_input(char* to, s64 panel, const char* from, s64 pixel, s64 quads, s64 panels) {
        for (; panels >= 2; panels -= 2, to += 2 * panel, from += 2 * kPanelChannels) {
            const char* at = from;
            for (s64 q = 0; q < quads * kVector; q += kVector, at += kQuad * pixel) {
                __m512i two[2];
                load_two(at, pixel, two);
                _mm512_storeu_si512(to + q, two[0]);
                _mm512_storeu_si512(to + panel + q, two[1]);
            }
        }
        if (panels == 0) return;
        if (pixel == kPanelChannels)
            for (s64 q = 0; q < quads * kVector; q += kVector, from += kQuad * kPanelChannels)
                _mm512_storeu_si512(to + q, load_one<true>(from, pixel));
        else
            for (s64 q = 0; q < quads * kVector; q += kVector, from += kQuad * pixel)
                _mm512_storeu_si512(to + q, load_one<false>(from, pixel));
    }

    // 16 filters as two blocks of 8.
    static void store_filters(char* to, s64 block, __m512i v) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(v));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + block), _mm512_extracti64x4_epi64(v, 1));
    }
    template <bool kDense>
    static void pack_sixteen(char* to, s64 block, const char* from, s64 pixel, s64 quads, s32* filter_sums) {
        __m512i sums = _mm512_loadu_si512(filter_sums);
        for (; quads > 0; --quads, to += kFilters * kQuad, from += kQuad * pixel) {
            const __m512i v = load_one<kDense>(from, pixel);
            sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), v);
            store_filters(to, block, v);
        }
        _mm512_storeu_si512(filter_sums, sums);
    }
    static void pack_two(char* to, s64 block, const char* from, s64 pixel, s64 quads, s32* filter_sums) {
        __m512i sums[2] = {_mm512_loadu_si512(filter_sums), _mm512_loadu_si512(filter_sums + 16)};
        for (; quads > 0; --quads, to += kFilters * kQuad, from += kQuad * pixel) {
            __m512i two[2];
            load_two(from, pixel, two);
            for (int i = 0; i < 2; ++i) {
                sums[i] = _mm512_dpbusd_epi32(sums[i], _mm512_set1_epi8(1), two[i]);
                store_filters(to + 2 * i * block, block, two[i]);
            }
        }
        _mm512_storeu_si512(filter_sums, sums[0]);
        _mm512_storeu_si512(filter_sums + 16, sums[1]);
    }

    // The same for g by blocks of 8 filters, whose sums are added to filter_sums.
    static void pack_gradient(char* to, s64 block, const s8* gradient, s64 pixel, s64 quads, s64 filters, s32* filter_sums) {
        const char* from = reinterpret_cast<const char*>(gradient);
        for (; filters >= 32; filters -= 32, from += 32, to += 4 * block, filter_sums += 32)
            pack_two(to, block, from, pixel, quads, filter_sums);
        if (filters == 0) return;
        if (pixel == 16)
            pack_sixteen<true>(to, block, from, pixel, quads, filter_sums);
        else
            pack_sixteen<false>(to, block, from, pixel, quads, filter_sums);
    }

    template <int kColumn>
    static inline __attribute__((always_inline)) void add_filter(__m512i* sums, const __m512i& quad, const __m512i* inputs) {
        multiply_add(sums[0], inputs[0], quad);
        if constexpr (kColumn > 1) multiply_add(sums[1], inputs[1], quad);
        if constexpr (kColumn > 2) multiply_add(sums[2], inputs[2], quad);
    }

    // sums[filter * columns + column]. Whatever indexes them is a constant, from a pack and not from a loop, else gcc keeps
    // them in memory.
    template <int kColumn, int... kFilter, int... kSum>
    static inline __attribute__((always_inline)) void multiply_block(std::integer_sequence<int, kFilter...>,
                                                                     std::integer_sequence<int, kSum...>,
                                                                     const char* const* inputs, const char* gradients,
                                                                     const QuadStretch* stretch, s64 count, s32* to, bool add) {
        const auto at = [&](int i) { return to + (i % kColumn * kFilters + i / kColumn) * kPanelChannels; };
        if (add) (fetch_to_write(at(kSum)), ...);
        __m512i sums[sizeof...(kSum)];
        ((sums[kSum] = _mm512_setzero_si512()), ...);
        for (const QuadStretch* end = stretch + count; stretch < end; ++stretch) {
            const char *first = inputs[0] + stretch->x, *g = gradients + stretch->g;
            const s64 second = kColumn > 1 ? inputs[1] - inputs[0] : 0, third = kColumn > 2 ? inputs[2] - inputs[0] : 0;
            s64 left = stretch->steps;
            do {
                __m512i x[3];
                read(x[0], first);
                if constexpr (kColumn > 1) read(x[1], first + second);
                if constexpr (kColumn > 2) read(x[2], first + third);
                const auto one = [&](__m512i* own, const char* from) __attribute__((always_inline)) {
                    __m512i quad;
                    broadcast(quad, from);
                    add_filter<kColumn>(own, quad, x);
                };
                (one(sums + kFilter * kColumn, g + kFilter * kQuad), ...);
                first += kVector;
                g += kFilters * kQuad;
            } while (--left);
        }
        (write_sums(sums[kSum], at(kSum), add), ...);
    }

    template <int kColumn>
    static __attribute__((noinline)) void multiply_columns(const char* const* inputs, const char* gradients,
                                                           const QuadStretch* stretches, s64 count, s32* to, bool add) {
        multiply_block<kColumn>(std::make_integer_sequence<int, kFilters>(),
                                std::make_integer_sequence<int, kFilters * kColumn>(), inputs, gradients, stretches, count, to,
                                add);
    }

    static void multiply(s64 columns, const char* const* inputs, const char* gradients, const QuadStretch* stretches, s64 count,
                         s32* to, bool add) {
        if (columns == 3)
            multiply_columns<3>(inputs, gradients, stretches, count, to, add);
        else if (columns == 2)
            multiply_columns<2>(inputs, gradients, stretches, count, to, add);
        else
            multiply_columns<1>(inputs, gradients, stretches, count, to, add);
    }
};

}  // namespace
}  // namespace byteback
