// SPDX-License-Identifier: Apache-2.0
#include "core/peak.h"
#include "core/x86/peak_loop.h"

namespace byteback::avx2 {

s64 multiply_quads(s64 rounds) {
    const __m256i a = _mm256_set1_epi8(85), b = _mm256_set1_epi8(-86), ones = _mm256_set1_epi16(1);
    repeat(rounds, _mm256_setzero_si256(), [=](__m256i& sum) {
        __m256i product;
        asm volatile(
            "vpmaddubsw %[b], %[a], %[product]\n\t"
            "vpmaddwd %[ones], %[product], %[product]\n\t"
            "vpaddd %[product], %[sum], %[sum]"
            : [sum] "+x"(sum), [product] "=&x"(product)
            : [a] "x"(a), [b] "x"(b), [ones] "x"(ones));
    });
    return rounds * kSums * 32;
}

s64 multiply_pairs(s64 rounds) {
    const __m256i a = _mm256_set1_epi16(85), b = _mm256_set1_epi16(-86);
    repeat(rounds, _mm256_setzero_si256(), [=](__m256i& sum) {
        __m256i product;
        asm volatile(
            "vpmaddwd %[b], %[a], %[product]\n\t"
            "vpaddd %[product], %[sum], %[sum]"
            : [sum] "+x"(sum), [product] "=&x"(product)
            : [a] "x"(a), [b] "x"(b));
    });
    return rounds * kSums * 16;
}

s64 multiply_floats(s64 rounds) {
    const __m256 a = _mm256_set1_ps(1.5f), b = _mm256_set1_ps(0.5f);
    repeat(rounds, _mm256_setzero_ps(), [=](__m256& sum) {
        asm volatile("vfmadd231ps %[b], %[a], %[sum]" : [sum] "+x"(sum) : [a] "x"(a), [b] "x"(b));
    });
    return rounds * kSums * 8;
}

}  // namespace byteback::avx2
