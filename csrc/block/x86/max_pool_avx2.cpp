// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "block/max_pool.h"

namespace byteback::avx2 {

namespace {

constexpr s64 kChannels = 32;  // four vectors of values and four of taps stay in registers

// 32 channels of one window; the rest of the channels goes channel by channel.
void largest_vectors(const f32* image, const Tap* taps, s64 count, s64 channels, f32* y, u8* which) {
    s64 c = 0;
    for (; c + kChannels <= channels; c += kChannels) {
        __m256 best[4];
        __m256 chosen[4];  // integers
        for (int v = 0; v < 4; ++v) {
            best[v] = _mm256_set1_ps(-std::numeric_limits<f32>::infinity());
            chosen[v] = _mm256_castsi256_ps(_mm256_set1_epi32(taps[0].number));
        }
        for (s64 t = 0; t < count; ++t) {
            const f32* x = image + taps[t].offset + c;
            const __m256 tap = _mm256_castsi256_ps(_mm256_set1_epi32(taps[t].number));
            for (int v = 0; v < 4; ++v) {
                const __m256 value = _mm256_loadu_ps(x + 8 * v);
                const __m256 better = _mm256_or_ps(_mm256_cmp_ps(value, best[v], _CMP_GT_OQ), _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
                best[v] = _mm256_blendv_ps(best[v], value, better);
                chosen[v] = _mm256_blendv_ps(chosen[v], tap, better);
            }
        }
        for (int v = 0; v < 4; ++v) _mm256_storeu_ps(y + c + 8 * v, best[v]);
        const __m256i low = _mm256_packus_epi32(_mm256_castps_si256(chosen[0]), _mm256_castps_si256(chosen[1]));
        const __m256i high = _mm256_packus_epi32(_mm256_castps_si256(chosen[2]), _mm256_castps_si256(chosen[3]));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works within halves
        const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(which + c), bytes);
    }
    largest(image, taps, count, c, channels, y, which);
}

}  // namespace

void max_pool(const Windows& p, const f32* x, f32* y, u8* taps, int threads) {
    pool_windows(p, x, y, taps, threads, largest_vectors);
}

void max_pool_grad(const Windows& p, const f32* g, const u8* taps, f32* dx, int threads) {
    pool_gradient(p, g, taps, dx, threads);
}

}  // namespace byteback::avx2
