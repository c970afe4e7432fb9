# SPDX-License-Identifier: Apache-2.0
"""float64 sums of each channel in the order of reference/statistics.py: 64 rows one after another, then a halving tree.

x is (ROWS, C), dense. A program adds BB blocks of 64 rows for BC channels and writes part (sums, blocks, C). `fold` adds parts:
it halves the number of rows until N_OUT are left. With `when`, kernels do nothing if that number is 0.
"""

import triton
import triton.language as tl

from byteback.ops.backends.triton.kernels.rounding import clamped, inverse_scale, is_live, nearest

_BLOCK = tl.constexpr(64)  # contract.limits.STATISTICS_BLOCK


@triton.jit
def _halve(t, ROWS: tl.constexpr, N: tl.constexpr):
    """Returns the halving-tree sum along the second axis of t (ROWS, N)."""
    if N == 1:
        return tl.reshape(t, (ROWS,))
    else:
        low, high = tl.split(tl.permute(tl.reshape(t, (ROWS, 2, N // 2)), (0, 2, 1)))
        return _halve(low + high, ROWS, N // 2)


@triton.jit
def fold(
    v, out, when, ROWS, N_OUT, C, VQ, VR, VC,
    IF: tl.constexpr, LEAVES: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """out (sums, N_OUT, C): row i adds rows i + j · N_OUT of v for all j < LEAVES. Missing rows are 0."""
    if IF:
        if tl.load(when) == 0:
            return
    i = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    row = i + tl.arange(0, LEAVES) * N_OUT
    where = v + tl.program_id(2) * VQ + (row * VR)[None, :] + (c * VC)[:, None]
    t = tl.load(where, mask=(row < ROWS)[None, :] & (c < C)[:, None], other=0.0)
    to = out + (tl.program_id(2) * N_OUT + i) * C + c
    tl.store(to, _halve(t, BC, LEAVES), mask=c < C)


@triton.jit
def stats(x, part, low, high, ROWS, C, SUMS, BB: tl.constexpr, BC: tl.constexpr):
    """Σx and Σx², and the smallest and largest value of each block. x is float32 or bfloat16."""
    blk = tl.program_id(0) * BB + tl.arange(0, BB)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    has = (blk * _BLOCK < ROWS)[:, None] & (c < C)[None, :]
    at = (blk * _BLOCK * C)[:, None] + c[None, :]
    v = tl.load(x + at, mask=has, other=0.0).to(tl.float32)
    least, most = v, v
    s = v.to(tl.float64)
    s2 = s * s
    for i in range(1, 64):
        ok = (blk * _BLOCK + i < ROWS)[:, None] & (c < C)[None, :]
        v = tl.load(x + at + i * C, mask=ok, other=0.0).to(tl.float32)
        least = tl.where(ok & ((v < least) | (v != v)), v, least)
        most = tl.where(ok & ((v > most) | (v != v)), v, most)
        wide = v.to(tl.float64)
        s = s + wide
        s2 = s2 + wide * wide
    to = (blk * C)[:, None] + c[None, :]
    tl.store(part + to, s, mask=has)
    tl.store(part + SUMS + to, s2, mask=has)
    tl.store(low + to, least, mask=has)
    tl.store(high + to, most, mask=has)


@triton.jit
def dots(x, q, part, when, ROWS, C, SUMS, IF: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr):
    """Σx·q, Σq·q and Σx·x for int8 q."""
    if IF:
        if tl.load(when) == 0:
            return
    blk = tl.program_id(0) * BB + tl.arange(0, BB)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    has = (blk * _BLOCK < ROWS)[:, None] & (c < C)[None, :]
    at = (blk * _BLOCK * C)[:, None] + c[None, :]
    v = tl.load(x + at, mask=has, other=0.0).to(tl.float64)
    w = tl.load(q + at, mask=has, other=0).to(tl.float64)
    xq, qq, xx = v * w, w * w, v * v
    for i in range(1, 64):
        ok = (blk * _BLOCK + i < ROWS)[:, None] & (c < C)[None, :]
        v = tl.load(x + at + i * C, mask=ok, other=0.0).to(tl.float64)
        w = tl.load(q + at + i * C, mask=ok, other=0).to(tl.float64)
        xq = xq + v * w
        qq = qq + w * w
        xx = xx + v * v
    to = (blk * C)[:, None] + c[None, :]
    tl.store(part + to, xq, mask=has)
    tl.store(part + SUMS + to, qq, mask=has)
    tl.store(part + 2 * SUMS + to, xx, mask=has)


@triton.jit
def _terms(v, clip, STOCHASTIC: tl.constexpr):
    """Returns x·q, q·q and x·x in float64, expected values with STOCHASTIC."""
    live, inv = is_live(clip), inverse_scale(clip)
    wide = v.to(tl.float64)
    if STOCHASTIC:
        y = tl.abs(v) * inv
        y = tl.where(live, tl.where(y > 127.0, 127.0, y), 0.0).to(tl.float64)
        n = tl.floor(y)
        return tl.abs(wide) * y, n * n + (y - n) * (2.0 * n + 1.0), wide * wide
    else:
        q = tl.where(live, nearest(clamped(v * inv)), 0.0).to(tl.float64)
        return wide * q, q * q, wide * wide


@triton.jit
def cosines(
    x, clips, part, when, ROWS, C, SUMS, CT, CC,
    STOCHASTIC: tl.constexpr, IF: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The three sums for each candidate clip (third grid axis): part (candidates, 3, blocks, C)."""
    if IF:
        if tl.load(when) == 0:
            return
    blk = tl.program_id(0) * BB + tl.arange(0, BB)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    tried = tl.program_id(2)
    clip = tl.load(clips + tried * CT + c * CC, mask=c < C, other=1.0)[None, :]
    has = (blk * _BLOCK < ROWS)[:, None] & (c < C)[None, :]
    at = (blk * _BLOCK * C)[:, None] + c[None, :]
    xq, qq, xx = _terms(tl.load(x + at, mask=has, other=0.0), clip, STOCHASTIC)
    for i in range(1, 64):
        ok = (blk * _BLOCK + i < ROWS)[:, None] & (c < C)[None, :]
        a, b, d = _terms(tl.load(x + at + i * C, mask=ok, other=0.0), clip, STOCHASTIC)
        xq = xq + a
        qq = qq + b
        xx = xx + d
    to = part + tried * 3 * SUMS + (blk * C)[:, None] + c[None, :]
    tl.store(to, xq, mask=has)
    tl.store(to + SUMS, qq, mask=has)
    tl.store(to + 2 * SUMS, xx, mask=has)


@triton.jit
def tails(x, each, one, tail, tail_one, ROWS, C, PER, BR: tl.constexpr, BC: tl.constexpr):
    """How many |x| of each channel exceed its own threshold, and one for all. Counts are int64 and start at 0."""
    m = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    ok = (m < ROWS)[:, None] & (c < C)[None, :]
    v = tl.abs(tl.load(x + (m * C)[:, None] + c[None, :], mask=ok, other=0.0))
    own = tl.load(each + c * PER, mask=c < C, other=0.0)[None, :]
    tl.atomic_add(tail + c, tl.sum((ok & (v > own)).to(tl.int32), 0).to(tl.int64), mask=c < C, sem="relaxed")
    all_of = tl.load(one + c * 0)[None, :]
    tl.atomic_add(tail_one + c, tl.sum((ok & (v > all_of)).to(tl.int32), 0).to(tl.int64), mask=c < C, sem="relaxed")
