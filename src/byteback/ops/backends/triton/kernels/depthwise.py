# SPDX-License-Identifier: Apache-2.0
"""The three products of a depthwise convolution (groups = C = K). It sums over taps only, too little for tensor cores.

x and g are (N, pixels, C), w is (T·R·S, C); all tensors are dense. conv_grad_weight.finish adds the slices of grad_weight.
"""

import triton
import triton.language as tl


@triton.jit
def output(
    x, w, y, factor,
    N, D, H, W, C, OD, OH, OW,
    SD, SH, SW, PD, PH, PW, DD, DH, DW,
    YN, YP, YK, FN, FK,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    pixels = OD * OH * OW
    m = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    n, p = m // pixels, m % pixels
    od, oh, ow = p // (OW * OH), (p // OW) % OH, p % OW
    acc = tl.zeros((BP, BC), tl.int32)
    for tap in range(0, T * R * S):
        t, r, s = tap // (R * S), (tap // S) % R, tap % S
        d, h, v = od * SD - PD + t * DD, oh * SH - PH + r * DH, ow * SW - PW + s * DW
        inside = (n < N) & (d >= 0) & (d < D) & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        at = (((n * D + d) * H + h) * W + v) * C
        a = tl.load(x + at[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0)
        b = tl.load(w + tap * C + c, mask=c < C, other=0)
        acc += a.to(tl.int32) * b.to(tl.int32)[None, :]
    ok = (n < N)[:, None] & (c < C)[None, :]
    scale = tl.load(factor + (n * FN)[:, None] + (c * FK)[None, :], mask=ok, other=0.0)
    tl.store(y + (n * YN + p * YP)[:, None] + (c * YK)[None, :], acc.to(tl.float32) * scale, mask=ok)


@triton.jit
def grad_input(
    g, w, dx, factor,
    N, D, H, W, C, OD, OH, OW,
    SD, SH, SW, PD, PH, PW, DD, DH, DW,
    XN, XP, XC, FN, FC,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    pixels = D * H * W
    m = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    n, p = m // pixels, m % pixels
    d, h, v = p // (W * H), (p // W) % H, p % W
    acc = tl.zeros((BP, BC), tl.int32)
    for tap in range(0, T * R * S):
        t, r, s = tap // (R * S), (tap // S) % R, tap % S
        zd, zh, zw = d + PD - t * DD, h + PH - r * DH, v + PW - s * DW
        inside = (n < N) & (zd >= 0) & (zh >= 0) & (zw >= 0) & (zd % SD == 0) & (zh % SH == 0) & (zw % SW == 0)
        od, oh, ow = zd // SD, zh // SH, zw // SW
        inside = inside & (od < OD) & (oh < OH) & (ow < OW)
        at = (((n * OD + od) * OH + oh) * OW + ow) * C
        a = tl.load(g + at[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0)
        b = tl.load(w + tap * C + c, mask=c < C, other=0)
        acc += a.to(tl.int32) * b.to(tl.int32)[None, :]
    ok = (n < N)[:, None] & (c < C)[None, :]
    scale = tl.load(factor + (n * FN)[:, None] + (c * FC)[None, :], mask=ok, other=0.0)
    tl.store(dx + (n * XN + p * XP)[:, None] + (c * XC)[None, :], acc.to(tl.float32) * scale, mask=ok)


@triton.jit
def grad_weight(
    g, x, part,
    N, D, H, W, C, OD, OH, OW,
    SD, SH, SW, PD, PH, PW, DD, DH, DW, PER_SLICE,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    P = N * OD * OH * OW
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    tap = tl.program_id(1)
    t, r, s = tap // (R * S), (tap // S) % R, tap % S
    start = tl.program_id(2) * PER_SLICE
    acc = tl.zeros((BC,), tl.int32)
    for p0 in range(start, min(start + PER_SLICE, P), BP):
        p = p0 + tl.arange(0, BP)
        ow, oh, od, n = p % OW, (p // OW) % OH, (p // (OW * OH)) % OD, p // (OW * OH * OD)
        d, h, v = od * SD - PD + t * DD, oh * SH - PH + r * DH, ow * SW - PW + s * DW
        inside = (p < min(start + PER_SLICE, P)) & (d >= 0) & (d < D) & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        at = (((n * D + d) * H + h) * W + v) * C
        ok = inside[:, None] & (c < C)[None, :]
        a = tl.load(g + (p * C)[:, None] + c[None, :], mask=ok, other=0).to(tl.int32)
        b = tl.load(x + at[:, None] + c[None, :], mask=ok, other=0).to(tl.int32)
        acc += tl.sum(a * b, 0)
    where = part + tl.program_id(2) * (C * T * R * S) + c * (T * R * S) + tap
    tl.store(where, acc, mask=c < C)
