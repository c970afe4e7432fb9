# SPDX-License-Identifier: Apache-2.0
"""Floats to int8 with nearest or stochastic rounding; maxima; the noise key.

x is (N, P, C) with strides XN, XP, XC, so one kernel reads contiguous and channels-last tensors. BY says how the clip varies:
0 not, 1 along C, 2 along N. A kernel with `when` does nothing if that number is 0: such launches wait for no answer. With PACKS
the integers are also written packed by 16 images (packing.py).
"""

import triton
import triton.language as tl

from byteback.ops.backends.triton.kernels.packing import rows_of, store_packed
from byteback.ops.backends.triton.kernels.rounding import count_bad, raise_peak, scale_of, size_bits, to_int8


@triton.jit
def quantize(
    x, q, packed, clip, scale, key, counts, peak, when,
    N, P, C, XN, XP, XC,
    BY: tl.constexpr, NOISE: tl.constexpr, IF: tl.constexpr, PACKS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    if IF:
        if tl.load(when) == 0:
            return
    m, is_pixel = rows_of(tl.program_id(0), P, BR, PACKS)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    c = channel[None, :]
    n, p = (m // P)[:, None], (m % P)[:, None]
    row = m[:, None]
    ok = is_pixel[:, None] & (row < N * P) & (c < C)
    at = n * XN + p * XP + c * XC
    v = tl.load(x + at, mask=ok, other=0.0)
    if BY == 0:
        limit = tl.load(clip + c * 0)
        tl.store(scale + c * 0, scale_of(limit), mask=(c == 0) & (tl.program_id(0) == 0))
    elif BY == 1:
        limit = tl.load(clip + c, mask=c < C, other=1.0)
        tl.store(scale + c, scale_of(limit), mask=(c < C) & (tl.program_id(0) == 0))
    else:
        limit = tl.load(clip + n, mask=n < N, other=1.0)
        tl.store(scale + n, scale_of(limit), mask=(n < N) & (p == 0) & (tl.program_id(1) == 0))
    values = to_int8(v, limit, key, row, c, C, NOISE)
    tl.store(q + at, values, mask=ok)
    if PACKS:
        store_packed(packed, tl.where(ok, values, 0), tl.program_id(0), channel, P, C, BR, BC)
    count_bad(v, limit, ok, counts)
    raise_peak(v, ok, peak)


@triton.jit
def absmax(x, peak, N, P, C, XN, XP, XC, BY: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """peak is int32, the bits of max|x|: one number, or one for each index of C or N."""
    m = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    n, p = m // P, m % P
    ok = (m < N * P)[:, None] & (c < C)[None, :]
    v = tl.load(x + (n * XN + p * XP)[:, None] + (c * XC)[None, :], mask=ok, other=0.0)
    bits = tl.where(ok, size_bits(v), 0)
    if BY == 0:
        tl.atomic_max(peak, tl.max(tl.max(bits, 1), 0), sem="relaxed")
    elif BY == 1:
        tl.atomic_max(peak + c, tl.max(bits, 0), mask=c < C, sem="relaxed")
    else:
        tl.atomic_max(peak + n, tl.max(bits, 1), mask=n < N, sem="relaxed")


@triton.jit
def noise_key(seed, layer, count, key, RANK):
    """Philox 4x32-10 (contract/noise.py)."""
    s, n, layer_ = tl.load(seed), tl.load(count), tl.load(layer)
    k0, k1 = s.to(tl.uint32), (s >> 32).to(tl.uint32)
    c0, c1, c2 = n.to(tl.uint32), (n >> 32).to(tl.uint32), layer_.to(tl.uint32)
    c3 = (layer_ * 0 + RANK).to(tl.uint32)
    A: tl.constexpr = 0xD2511F53
    B: tl.constexpr = 0xCD9E8D57
    for _ in tl.static_range(10):
        h0, l0 = tl.umulhi(c0, (c0 * 0) + A), c0 * A
        h1, l1 = tl.umulhi(c2, (c2 * 0) + B), c2 * B
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    tl.store(key, c0.to(tl.int64))
    tl.store(key + 1, c1.to(tl.int64))
