// SPDX-License-Identifier: Apache-2.0
#include "quantizer/ledger.h"

#include <cmath>

namespace byteback {

std::array<u32, 2> noise_key(u64 seed, u64 count, u32 layer, u32 rank) {
    u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
    u32 c0 = static_cast<u32>(count), c1 = static_cast<u32>(count >> 32), c2 = layer, c3 = rank;
    for (int round = 0; round < 10; ++round) {
        const u64 p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
        c0 = static_cast<u32>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<u32>(p1);
        c2 = static_cast<u32>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<u32>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {c0, c1};
}

namespace {

// NaN if any is.
f32 largest(const f32* entries, s64 count) {
    f32 found = entries[0];
    for (s64 i = 1; i < count && !std::isnan(found); ++i)
        if (!(entries[i] <= found)) found = entries[i];
    return found;
}

// Scales per sample have no fixed shape: of those the largest clip is kept.
template <class F>
void each(const f32* entries, s64 count, s64 channels, F&& put) {
    if (count == channels)
        for (s64 i = 0; i < channels; ++i) put(i, entries[i]);
    else {
        const f32 most = largest(entries, count);
        for (s64 i = 0; i < channels; ++i) put(i, most);
    }
}

}  // namespace

void write_ledger(const LedgerRows& to, const LedgerEntry& e) {
    if (to.clip) {
        each(e.remembered, e.remembered_count, to.channels, [&](s64 i, f32 clip) { to.clip[i] = clip; });
        *to.initialized = 1.0f;
    }
    if (to.updated_at) *to.updated_at = e.iteration;
    for (int column = 0; column < 3; ++column)
        if (!std::isnan(e.columns[column])) to.observed[column] = e.columns[column];
    to.observed[3] = largest(e.clip, e.clip_count);
    if (to.tracked) {
        const f32 old = static_cast<f32>(1.0 - e.momentum), fresh = static_cast<f32>(e.momentum);
        const bool seen = *to.seen != 0.0f;
        each(e.clip, e.clip_count, to.channels,
             [&](s64 i, f32 clip) { to.tracked[i] = seen ? to.tracked[i] * old + clip * fresh : clip; });
    }
    *to.seen = 1.0f;
}

}  // namespace byteback
