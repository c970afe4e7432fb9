// SPDX-License-Identifier: Apache-2.0
// grad_weight with few channels on the AVX-512 VNNI path.
#include "core/avx512vnni.h"
#include "conv/direct/x86/direct_grad_weight_micro_avx512vnni.h"

namespace byteback::avx512vnni {

// One group, whole vectors, and an output row whose operands fit the second-level cache.
bool direct_grad_weight_fits(const ConvShape& s) {
    if (s.groups != 1 || s.kernel[0] != 1 || s.stride[0] != 1 || s.padding[0] != 0) return false;
    if (s.in_channels == 0 || s.in_channels % kPanelChannels != 0) return false;
    if (s.out_channels == 0 || s.out_channels % (2 * kFilters) != 0) return false;
    const s64 rows = (s.kernel[1] - 1) * s.dilation[1] + s.stride[1], versions = rows * s.kernel[2];
    return round_up(s.out[2], kQuad) * (versions * s.in_channels + s.out_channels) <= kMostRowBytes &&
           (s.in[2] + 2 * s.padding[2]) * s.in_channels <= kMostRowBytes;
}

void direct_grad_weight(const ConvShape& s, const s8* g, const s8* x, Factor factor, f32* dw, int threads) {
    run_direct_grad_weight<DirectQuads>(s, g, x, factor, dw, threads);
}

}  // namespace byteback::avx512vnni
