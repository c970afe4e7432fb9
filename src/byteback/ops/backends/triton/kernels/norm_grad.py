# SPDX-License-Identifier: Apache-2.0
"""The backward passes of a fused block: sums per channel, then dx = (p·gm + q·x) + r as floats or integers.

gm is g times the derivative of the activation: by the bits of a mask (GATE 1), or by z = a·x + b (GATE 2 to 6: activations.py).
KEPT says how x was saved: 0 float32, 1 bfloat16, 2 int8 with a step and a centre per channel. g is float32 or bfloat16.
"""

import triton
import triton.language as tl

from byteback.ops.backends.triton.kernels.activations import gated
from byteback.ops.backends.triton.kernels.packing import rows_of, store_packed
from byteback.ops.backends.triton.kernels.rounding import count_bad, scale_of, size_bits, to_bfloat16, to_int8


@triton.jit
def _kept(x, step, centre, at, c, ok, C, KEPT: tl.constexpr):
    v = tl.load(x + at, mask=ok, other=0).to(tl.float32)
    if KEPT == 2:
        v = v * tl.load(step + c, mask=c < C, other=1.0) + tl.load(centre + c, mask=c < C, other=0.0)
    return v


@triton.jit
def _masked(g, v, a, b, mask, row, c, ok, C, MASK_PITCH, GATE: tl.constexpr):
    gm = tl.load(g + row * C + c, mask=ok, other=0.0).to(tl.float32)
    if GATE == 1:
        byte = tl.load(mask + row * MASK_PITCH + c // 8, mask=ok, other=0).to(tl.int32)
        gm = tl.where((byte >> (c % 8)) & 1 != 0, gm, 0.0)
    if GATE >= 2:
        z = tl.load(a + c, mask=c < C, other=0.0) * v + tl.load(b + c, mask=c < C, other=0.0)
        gm = gated(gm, z, GATE)
    return gm


@triton.jit
def waiting(x, g, mask, out, ROWS, C, MASK_PITCH, GATE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """out = x + gm."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    ok = (row < ROWS) & (c < C)
    gm = _masked(g, 0.0, g, g, mask, row, c, ok, C, MASK_PITCH, GATE)
    tl.store(out + row * C + c, tl.load(x + row * C + c, mask=ok, other=0.0).to(tl.float32) + gm, mask=ok)


@triton.jit
def sums(
    g, x, step, centre, a, b, mask, masked, part, ROWS, C, MASK_PITCH, SUMS,
    KEPT: tl.constexpr, GATE: tl.constexpr, STORE: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Σgm, Σ gm·x and Σgm² of blocks of 64 rows: part (3, blocks, C). STORE: 1 also writes gm, 2 the bits of gm as bfloat16."""
    first = (tl.program_id(0) * BB + tl.arange(0, BB)[:, None]) * 64
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    total = tl.zeros((BB, BC), tl.float64)
    dot = tl.zeros((BB, BC), tl.float64)
    squares = tl.zeros((BB, BC), tl.float64)
    for i in range(0, 64):
        row = first + i
        ok = (row < ROWS) & (c < C)
        v = _kept(x, step, centre, row * C + c, c, ok, C, KEPT)
        gm = _masked(g, v, a, b, mask, row, c, ok, C, MASK_PITCH, GATE)
        if STORE == 1:
            tl.store(masked + row * C + c, gm, mask=ok)
        if STORE == 2:
            tl.store(masked + row * C + c, to_bfloat16(gm), mask=ok)
        wide = gm.to(tl.float64)
        product, square = wide * tl.where(ok, v, 0.0).to(tl.float64), wide * wide
        # The first row starts the sum, so that a sum of -0 stays -0.
        total = tl.where(i == 0, wide, total + wide)
        dot = tl.where(i == 0, product, dot + product)
        squares = tl.where(i == 0, square, squares + square)
    to = part + (first // 64) * C + c
    has = (first < ROWS) & (c < C)
    tl.store(to, total, mask=has)
    tl.store(to + SUMS, dot, mask=has)
    tl.store(to + 2 * SUMS, squares, mask=has)


@triton.jit
def gradient(
    g, x, step, centre, a, b, mask, p, q, r,
    out, one, one_clip, one_scale, one_counts, each, each_clip, each_scale, each_counts,
    peak, tail, tail_one, each_threshold, one_threshold, key, when, packed,
    ROWS, P, C, MASK_PITCH,
    KEPT: tl.constexpr, GATE: tl.constexpr, FLOAT: tl.constexpr, ONE: tl.constexpr, EACH: tl.constexpr,
    TAILS: tl.constexpr, PEAK: tl.constexpr, NOISE: tl.constexpr, IF: tl.constexpr, PACKS: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One pass over dx: as floats (FLOAT), as int8 by one clip (ONE) and by a clip per channel (EACH).

    PEAK: 1 raises the maximum of the tensor, 2 that of each channel. TAILS counts |dx| beyond two thresholds. PACKS also writes
    the integers packed by 16 images (packing.py): those by a clip per channel if there are both.
    """
    if IF:
        if tl.load(when) == 0:
            return
    row, is_pixel = rows_of(tl.program_id(0), P, BR, PACKS)
    row = row[:, None]
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    c = channel[None, :]
    ok = is_pixel[:, None] & (row < ROWS) & (c < C)
    at = row * C + c
    v = _kept(x, step, centre, at, c, ok, C, KEPT)
    gm = _masked(g, v, a, b, mask, row, c, ok, C, MASK_PITCH, GATE)
    pv, qv = tl.load(p + c, mask=c < C, other=0.0), tl.load(q + c, mask=c < C, other=0.0)
    dx = (pv * gm + qv * v) + tl.load(r + c, mask=c < C, other=0.0)
    first = tl.program_id(0) == 0
    if FLOAT:
        tl.store(out + at, dx, mask=ok)
    if ONE:
        limit = tl.load(one_clip + c * 0)
        tl.store(one_scale + c * 0, scale_of(limit), mask=(c == 0) & first)
        values = to_int8(dx, limit, key, row, c, C, NOISE)
        tl.store(one + at, values, mask=ok)
        count_bad(dx, limit, ok, one_counts)
    if EACH:
        limit = tl.load(each_clip + c, mask=c < C, other=1.0)
        tl.store(each_scale + c, scale_of(limit), mask=(c < C) & first)
        values = to_int8(dx, limit, key, row, c, C, NOISE)
        tl.store(each + at, values, mask=ok)
        count_bad(dx, limit, ok, each_counts)
    if PACKS:
        store_packed(packed, tl.where(ok, values, 0), tl.program_id(0), channel, P, C, BR, BC)
    bits = tl.where(ok, size_bits(dx), 0)
    if PEAK == 1:
        tl.atomic_max(peak, tl.max(tl.max(bits, 1), 0), sem="relaxed")
    if PEAK == 2:
        tl.atomic_max(peak + channel, tl.max(bits, 0), mask=channel < C, sem="relaxed")
    if TAILS:
        size = tl.abs(dx)
        beyond = ok & (size > tl.load(each_threshold + c, mask=c < C, other=0.0))
        tl.atomic_add(tail + channel, tl.sum(beyond.to(tl.int32), 0).to(tl.int64), mask=channel < C, sem="relaxed")
        beyond = ok & (size > tl.load(one_threshold + c * 0))
        tl.atomic_add(tail_one + channel, tl.sum(beyond.to(tl.int32), 0).to(tl.int64), mask=channel < C, sem="relaxed")
