# SPDX-License-Identifier: Apache-2.0
"""grad_weight = g ⋆ x with tensor cores, from operands packed by 16 images.

The sum runs over images and pixels. Tensor cores want its terms side by side in memory, in both operands, and a tap of the
kernel shifts x by pixels. So 16 images are interleaved: 16 neighbouring bytes are one pixel and channel of 16 images, and
every tap shifts whole groups. Missing images of the last group are zeros.

    pack           (N, P, C) -> (N/16, P, C, 16)
    grad_weight    gp (N/16, OD, OH, OW, K, 16), xp (N/16, D, H, W, C, 16) -> part (slices, K, T·R·S, C/groups) int32
    finish         adds the slices in int64 and multiplies with the scales

A slice adds at most 133,144 products, because some GPUs saturate int32 sums and others wrap.
"""

import triton
import triton.language as tl

GROUP = 16


@triton.jit
def pack(x, xp, N, P, C, G: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    group = tl.program_id(2)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    n = group * G + tl.arange(0, G)
    ok = (n < N)[:, None, None] & (p < P)[None, :, None] & (c < C)[None, None, :]
    v = tl.load(x + (n * P)[:, None, None] * C + (p * C)[None, :, None] + c[None, None, :], mask=ok, other=0)
    to = ((group * P + p) * C)[:, None, None] * G + (c * G)[None, :, None] + tl.arange(0, G)[None, None, :]
    tl.store(xp + to, tl.permute(v, (1, 2, 0)), mask=(p < P)[:, None, None] & (c < C)[None, :, None])


@triton.jit
def grad_weight(
    gp, xp, part,
    NG, D, H, W, C, K, CG, KG, OD, OH, OW,
    SD, SH, SW, PD, PH, PW, DD, DH, DW, PER_SLICE,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    P = NG * OD * OH * OW
    tiles_m, tiles_n = tl.cdiv(KG, BM), tl.cdiv(CG, BN)
    group, k0 = tl.program_id(0) // tiles_m, (tl.program_id(0) % tiles_m) * BM
    tap, c0 = tl.program_id(1) // tiles_n, (tl.program_id(1) % tiles_n) * BN
    start = tl.program_id(2) * PER_SLICE
    t, r, s = tap // (R * S), (tap // S) % R, tap % S
    kg, cg = k0 * G + tl.arange(0, BM * G), c0 * G + tl.arange(0, BN * G)
    Q: tl.constexpr = BK // G
    acc = tl.zeros((BM, BN), tl.int32)
    for p0 in range(start, min(start + PER_SLICE, P), Q):
        p = p0 + tl.arange(0, Q)
        ow, oh, od, n = p % OW, (p // OW) % OH, (p // (OW * OH)) % OD, p // (OW * OH * OD)
        d, h, w = od * SD - PD + t * DD, oh * SH - PH + r * DH, ow * SW - PW + s * DW
        inside = (p < P) & (d >= 0) & (d < D) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        q = ((n * D + d) * H + h) * W + w
        at_g, at_x = (p * K + group * KG) * G, (q * C + group * CG) * G
        a = tl.load(gp + at_g[:, None] + kg[None, :], mask=inside[:, None] & (kg < KG * G)[None, :], other=0)
        b = tl.load(xp + at_x[:, None] + cg[None, :], mask=inside[:, None] & (cg < CG * G)[None, :], other=0)
        a = tl.reshape(tl.permute(tl.reshape(a, (Q, BM, G)), (1, 0, 2)), (BM, BK))
        b = tl.permute(tl.reshape(tl.permute(tl.reshape(b, (Q, BN, G)), (1, 0, 2)), (BN, BK)), (1, 0))
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    k, c = k0 + tl.arange(0, BM), c0 + tl.arange(0, BN)
    row = (group * KG + k) * (T * R * S * CG) + tap * CG
    where = part + tl.program_id(2).to(tl.int64) * (K * T * R * S * CG) + row[:, None] + c[None, :]
    tl.store(where, acc, mask=(k < KG)[:, None] & (c < CG)[None, :])


@triton.jit
def finish(part, dw, factor, SLICES, TOTAL, TAPS, CG, WK, WT, WC, FK, FC, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    ok = at < TOTAL
    acc = tl.zeros((B,), tl.int64)
    where = part + at
    for _ in range(0, SLICES):
        acc += tl.load(where, mask=ok, other=0).to(tl.int64)
        where += TOTAL
    c, tap, k = at % CG, (at // CG) % TAPS, at // (CG * TAPS)
    scale = tl.load(factor + k * FK + c * FC, mask=ok, other=0.0)
    tl.store(dw + k * WK + tap * WT + c * WC, acc.to(tl.float32) * scale, mask=ok)
