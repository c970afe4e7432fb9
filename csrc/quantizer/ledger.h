// SPDX-License-Identifier: Apache-2.0
// Small computations of a training step that would take longer in PyTorch than a small layer: the noise key of a gradient, and
// the update of quantizer state (the reference is in ops/contract/noise.py and ops/backends/reference/quantizer.py). All paths
// use it.
#pragma once

#include <array>

#include "core/types.h"

namespace byteback {

// Philox 4x32-10 of (seed; count, layer, rank): the first two words.
std::array<u32, 2> noise_key(u64 seed, u64 count, u32 layer, u32 rank);

struct LedgerRows {  // one call slot of a quantizer's buffers; null where nothing is to be written
    f32 *clip, *initialized;
    s64* updated_at;
    f32 *observed, *tracked, *seen;
    s64 channels;  // of clip and tracked
};

struct LedgerEntry {
    const f32* clip;  // clip_count numbers: the clips in use
    s64 clip_count;
    const f32* remembered;  // likewise, for the next step
    s64 remembered_count;
    s64 iteration;
    f32 columns[3];  // saturated share, direction deviation, Gaussian share; NaN leaves a column as it is
    f64 momentum;
};

void write_ledger(const LedgerRows&, const LedgerEntry&);

}  // namespace byteback
