# SPDX-License-Identifier: Apache-2.0
"""From a float to an int8 value: the arithmetic that all passes share (contract/noise.py, reference/quantize.py)."""

import triton
import triton.language as tl

_TINY = tl.constexpr(2.0**-100)  # contract.limits.TINY_CLIP
_SHIFT = tl.constexpr(1.5 * 2.0**23)  # adding it rounds |y| < 2^22 to a whole number, half to even
_INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def is_live(clip):
    return (clip >= _TINY) & (clip < float("inf"))


@triton.jit
def inverse_scale(clip):
    """Returns 127 / clip; 127 for a clip that counts as zero."""
    return tl.div_rn(tl.zeros_like(clip) + 127.0, tl.where(is_live(clip), clip, 1.0))


@triton.jit
def scale_of(clip):
    """Returns clip / 127; 1 for a clip that counts as zero."""
    live = is_live(clip)
    return tl.where(live, tl.div_rn(tl.where(live, clip, 1.0), tl.zeros_like(clip) + 127.0), 1.0)


@triton.jit
def nearest(y):
    """Returns y rounded to the nearest whole number, half to even, with the sign of y also for 0."""
    size = (tl.abs(y) + _SHIFT) - _SHIFT
    return tl.where(y.to(tl.int32, bitcast=True) < 0, -size, size)


@triton.jit
def clamped(y):
    """Returns y within ±127. NaN stays NaN."""
    return tl.where(y > 127.0, 127.0, tl.where(y < -127.0, -127.0, y))


@triton.jit
def mix32(h):
    """The finalizer of murmur3."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def uniform(key, row, c, C):
    """Returns the noise of an element: rows are pixels in N, (D,) H, W order. row and c broadcast."""
    k0, k1 = tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
    index = row.to(tl.uint32) * ((c * 0 + C + 1) // 2).to(tl.uint32) + (c // 2).to(tl.uint32)
    h = mix32((index * 0x9E3779B1 + k0) ^ k1)
    half = tl.where(c % 2 == 1, h >> 16, h & 0xFFFF)
    return (half.to(tl.float32) + 0.5) * (1.0 / 65536.0)


@triton.jit
def to_int8(v, clip, key, row, c, C, NOISE: tl.constexpr):
    """Returns v as int8. clip, row and c broadcast over v."""
    y = clamped(v * inverse_scale(clip))
    if NOISE:
        y = tl.floor(y + uniform(key, row, c, C))
    else:
        y = nearest(y)
    return tl.where(is_live(clip) & (v == v), y, 0.0).to(tl.int8)


@triton.jit
def to_bfloat16(v):
    """Returns the bits of v as bfloat16, in int16 (contract/bfloat16.py)."""
    bits = v.to(tl.int32, bitcast=True)
    nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(v != v, 0x7FC0, nearest_even).to(tl.int16)


@triton.jit
def size_bits(v):
    """Returns the bits of |v|, which order as the numbers do; NaN is above all."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def count_bad(v, clip, ok, counts):
    """Adds to counts how many values exceed the clip, and how many are NaN or Inf."""
    over = ok & (tl.abs(v) > clip) & is_live(clip)
    bad = ok & (size_bits(v) >= _INF_BITS)
    tl.atomic_add(counts, tl.sum(tl.sum(over.to(tl.int32), 1), 0).to(tl.int64), sem="relaxed")
    tl.atomic_add(counts + 1, tl.sum(tl.sum(bad.to(tl.int32), 1), 0).to(tl.int64), sem="relaxed")


@triton.jit
def raise_peak(v, ok, peak):
    """peak = max(peak, max|v|), by bits."""
    tl.atomic_max(peak, tl.max(tl.max(tl.where(ok, size_bits(v), 0), 1), 0), sem="relaxed")
