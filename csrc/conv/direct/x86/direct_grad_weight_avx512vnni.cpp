// SPDX-License-Identifier: Apache-2.0
// grad_weight with few channels on the AVX-512 VNNI path.
#include "core/avx512vnni.h"
#include "conv/direct/x86/direct_grad_weight_micro_avx512vnni.h"

namespace byteback::avx512vnni {

// Of a row more pixels would not fit a chunk.
bool direct_grad_weight_fits(const ConvShape& s) {
    return s.group_in() > 0 && s.group_out() > 0 && s.group_in() % kPanelChannels == 0 && s.group_out() % (2 * kFilters) == 0 &&
           s.kernel[0] == 1 && s.stride[0] == 1 && s.padding[0] == 0 && s.out[2] <= 4096 && s.in[2] <= 65536;
}

void direct_grad_weight(const ConvShape& s, const s8* g, const s8* x, Factor factor, f32* dw, int threads) {
    run_direct_grad_weight<DirectQuads>(s, g, x, factor, dw, threads);
}

}  // namespace byteback::avx512vnni
