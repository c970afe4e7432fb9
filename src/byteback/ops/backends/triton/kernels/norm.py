# SPDX-License-Identifier: Apache-2.0
"""The forward passes of a fused block: the arithmetic of a norm per channel, then activation(a·x + b + residual).

x is (ROWS, C), dense. Every float operation rounds once, in the order of reference/block.py and reference/norm.py.
"""

import triton
import triton.language as tl

from byteback.ops.backends.triton.kernels.activations import activated
from byteback.ops.backends.triton.kernels.packing import rows_of, store_packed
from byteback.ops.backends.triton.kernels.rounding import (
    clamped,
    count_bad,
    nearest,
    raise_peak,
    scale_of,
    size_bits,
    to_bfloat16,
    to_int8,
)


@triton.jit
def affine(invstd, centre, gamma, beta, c, ok, GAMMA: tl.constexpr, BETA: tl.constexpr):
    """Returns a = gamma · invstd and b = beta - centre · a, each rounded to float32 once."""
    wide = invstd
    if GAMMA:
        wide = tl.load(gamma + c, mask=ok, other=1.0).to(tl.float64) * invstd
    a = wide.to(tl.float32)
    shift = centre * a.to(tl.float64)
    if BETA:
        b = (tl.load(beta + c, mask=ok, other=0.0).to(tl.float64) - shift).to(tl.float32)
    else:
        b = (-shift).to(tl.float32)
    return a, b


@triton.jit
def coefficients(
    total, squares, low, high, gamma, beta, bias, mean_, var_, eps, out_a, out_b, out_mean, out_invstd, peak,
    COUNT, UNBIASED, KEEP, ADD, C,
    GAMMA: tl.constexpr, BETA: tl.constexpr, BIAS: tl.constexpr, RUNNING: tl.constexpr,
    ACT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """a, b, mean, invstd and max|activation| of a norm from its sums; updates the running statistics.

    COUNT and UNBIASED (count / (count - 1)) are float64 numbers in memory, KEEP and ADD are 1 - momentum and momentum.
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    ok = c < C
    count = tl.load(COUNT + c * 0)
    mean = tl.load(total + c, mask=ok, other=0.0) / count
    var = tl.load(squares + c, mask=ok, other=0.0) / count - mean * mean
    var = tl.where(var < 0.0, 0.0, var)
    if RUNNING:
        seen = mean
        if BIAS:
            seen = mean + tl.load(bias + c, mask=ok, other=0.0).to(tl.float64)
        unbiased = (var * tl.load(UNBIASED + c * 0)).to(tl.float32)
        before = tl.load(mean_ + c, mask=ok, other=0.0)
        tl.store(mean_ + c, before * KEEP + seen.to(tl.float32) * ADD, mask=ok)
        before = tl.load(var_ + c, mask=ok, other=0.0)
        tl.store(var_ + c, before * KEEP + unbiased * ADD, mask=ok)
    invstd = (tl.zeros_like(var) + 1.0) / tl.sqrt(var + tl.load(eps + c * 0))
    a, b = affine(invstd, mean, gamma, beta, c, ok, GAMMA, BETA)
    tl.store(out_a + c, a, mask=ok)
    tl.store(out_b + c, b, mask=ok)
    tl.store(out_mean + c, mean, mask=ok)
    tl.store(out_invstd + c, invstd, mask=ok)
    lowest = activated(tl.load(low + c, mask=ok, other=0.0) * a + b, ACT)
    highest = activated(tl.load(high + c, mask=ok, other=0.0) * a + b, ACT)
    bits = tl.maximum(size_bits(lowest), size_bits(highest))
    tl.atomic_max(peak, tl.max(tl.where(ok, bits, 0), 0), sem="relaxed")


@triton.jit
def normalize(
    x, a, b, residual, residual_scale, clip, q, packed, scale, out, mask, counts, peak, kept, centre, step_of,
    ROWS, P, C, PITCH, MASK_PITCH,
    RESIDUAL: tl.constexpr, ACT: tl.constexpr, ROUNDS: tl.constexpr,
    INT8: tl.constexpr, FLOAT: tl.constexpr, MASK: tl.constexpr, PEAK: tl.constexpr, KEEP: tl.constexpr,
    PACKS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One pass. ACT is the number of the activation. RESIDUAL: 0 none, 1 floats, 2 int8 with one scale. Floats it reads are
    float32 or bfloat16. ROUNDS: out is the bits of bfloat16. KEEP: 1 stores x as int8 around a centre, 2 as bits of bfloat16.

    PITCH is the distance of pixels in q and out. PACKS also writes the integers packed by 16 images (packing.py).
    """
    row, is_pixel = rows_of(tl.program_id(0), P, BR, PACKS)
    row, is_pixel = row[:, None], is_pixel[:, None]
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    c = channel[None, :]
    ok = is_pixel & (row < ROWS) & (c < C)
    at = row * C + c
    v = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    z = tl.load(a + c, mask=c < C, other=0.0) * v + tl.load(b + c, mask=c < C, other=0.0)
    if RESIDUAL == 1:
        z = z + tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
    if RESIDUAL == 2:
        z = z + tl.load(residual + at, mask=ok, other=0).to(tl.float32) * tl.load(residual_scale)
    y = activated(z, ACT)
    to = row * PITCH + c
    if PEAK:
        raise_peak(y, ok, peak)
    if FLOAT:
        if ROUNDS:
            tl.store(out + to, to_bfloat16(y), mask=ok)
        else:
            tl.store(out + to, y, mask=ok)
    if INT8:
        limit = tl.load(clip + c * 0)
        tl.store(scale + c * 0, scale_of(limit), mask=(c == 0) & (tl.program_id(0) == 0))
        values = to_int8(y, limit, counts, row, c, C, False)
        tl.store(q + to, values, mask=ok)
        if PACKS:
            store_packed(packed, tl.where(ok, values, 0), tl.program_id(0), channel, P, C, BR, BC)
        count_bad(y, limit, ok, counts)
    if MASK:
        on = ok
        if ACT >= 1:
            on = on & (z > 0.0)
        if ACT == 2:
            on = on & (z < 6.0)
        bit = tl.reshape(on.to(tl.int32), (BR, BC // 8, 8)) << tl.arange(0, 8)[None, None, :]
        byte = tl.program_id(1) * (BC // 8) + tl.arange(0, BC // 8)[None, :]
        inside = is_pixel & (row < ROWS) & (byte < MASK_PITCH)
        tl.store(mask + row * MASK_PITCH + byte, tl.sum(bit, 2).to(tl.uint8), mask=inside)
    if KEEP == 2:
        tl.store(kept + at, to_bfloat16(v), mask=ok)
    if KEEP == 1:
        step = tl.load(step_of + c, mask=c < C, other=1.0)
        away = (v - tl.load(centre + c, mask=c < C, other=0.0)) * tl.div_rn(tl.zeros_like(step) + 1.0, step)
        tl.store(kept + at, tl.where(away != away, 0.0, nearest(clamped(away))).to(tl.int8), mask=ok)


@triton.jit
def rounded(x, out, TOTAL, B: tl.constexpr):
    """out = the bits of x as bfloat16."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + at, to_bfloat16(tl.load(x + at, mask=at < TOTAL, other=0.0)), mask=at < TOTAL)


@triton.jit
def keep_step(low, high, centre, step, C, BC: tl.constexpr):
    """The int8 step of each channel for the saved input of a norm (reference/block.py: norm_step)."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    mid = tl.load(centre + c, mask=c < C, other=0.0)
    below = tl.abs(tl.load(low + c, mask=c < C, other=0.0) - mid)
    above = tl.abs(tl.load(high + c, mask=c < C, other=0.0) - mid)
    reach = tl.where((below > above) | (below != below), below, above)
    tl.store(step + c, scale_of(reach), mask=c < C)
