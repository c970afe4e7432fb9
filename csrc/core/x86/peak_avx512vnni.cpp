// SPDX-License-Identifier: Apache-2.0
#include "core/peak.h"
#include "core/x86/peak_loop.h"

namespace byteback::avx512vnni {

s64 multiply_quads_256(s64 rounds) {
    const __m256i a = _mm256_set1_epi8(85), b = _mm256_set1_epi8(-86);
    repeat(rounds, _mm256_setzero_si256(), [=](__m256i& sum) {
        asm volatile("vpdpbusd %[b], %[a], %[sum]" : [sum] "+v"(sum) : [a] "v"(a), [b] "v"(b));
    });
    return rounds * kSums * 32;
}

s64 multiply_quads_512(s64 rounds) {
    const __m512i a = _mm512_set1_epi8(85), b = _mm512_set1_epi8(-86);
    repeat(rounds, _mm512_setzero_si512(), [=](__m512i& sum) {
        asm volatile("vpdpbusd %[b], %[a], %[sum]" : [sum] "+v"(sum) : [a] "v"(a), [b] "v"(b));
    });
    return rounds * kSums * 64;
}

s64 multiply_pairs_512(s64 rounds) {
    const __m512i a = _mm512_set1_epi16(85), b = _mm512_set1_epi16(-86);
    repeat(rounds, _mm512_setzero_si512(), [=](__m512i& sum) {
        asm volatile("vpdpwssd %[b], %[a], %[sum]" : [sum] "+v"(sum) : [a] "v"(a), [b] "v"(b));
    });
    return rounds * kSums * 32;
}

s64 multiply_floats_512(s64 rounds) {
    const __m512 a = _mm512_set1_ps(1.5f), b = _mm512_set1_ps(0.5f);
    repeat(rounds, _mm512_setzero_ps(), [=](__m512& sum) {
        asm volatile("vfmadd231ps %[b], %[a], %[sum]" : [sum] "+v"(sum) : [a] "v"(a), [b] "v"(b));
    });
    return rounds * kSums * 16;
}

}  // namespace byteback::avx512vnni
