# SPDX-License-Identifier: Apache-2.0
"""grad_input = g ⋆ᵀ w as a matrix product: rows are input pixels, columns input channels, the sum runs over taps and K.

With a stride, only some taps reach an input pixel. Pixels whose coordinates have the same remainders by the stride (a phase)
are reached by the same taps, so each phase is one index of a grid axis, and no multiplication by zero is done.

g (N, OD, OH, OW, K), wt (groups, C/groups, T·R·S, K/groups), dx with the strides XN, XP, XC; all tensors are dense.
IMAGES: there is a factor for each image; one for each channel only takes fewer registers.
"""

import triton
import triton.language as tl


@triton.jit
def taps_of_phase(phase, P, S, D, TAPS: tl.constexpr):
    """Returns the first tap that reaches this phase, how many do, and the output index of the phase's first pixel under it."""
    first = tl.full((), 0, tl.int32)
    count = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    for tap in tl.static_range(TAPS):
        at = phase + P - tap * D
        hit = at % S == 0
        start = tl.where(hit & (count == 0), at // S, start)
        first = tl.where(hit & (count == 0), tap, first)
        count += hit.to(tl.int32)
    return first, count, start


@triton.jit
def conv_grad_input(
    g, wt, dx, factor,
    N, D, H, W, K, CG, KG, OD, OH, OW,
    SD, SH, SW, PD, PH, PW, DD, DH, DW,
    TD, TH, TW, JD, JH, JW,  # from one tap of a phase to the next, and how far the output index goes back then
    XN, XP, XC, FN, FC,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IMAGES: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(CG, BN)
    group = tl.program_id(1) // tiles_n
    phase = tl.program_id(2)
    pd, ph, pw = phase // (SH * SW), (phase // SW) % SH, phase % SW
    t0, nt, od0 = taps_of_phase(pd, PD, SD, DD, T)
    r0, nr, oh0 = taps_of_phase(ph, PH, SH, DH, R)
    s0, ns, ow0 = taps_of_phase(pw, PW, SW, DW, S)
    LD, LH, LW = (D - pd + SD - 1) // SD, (H - ph + SH - 1) // SH, (W - pw + SW - 1) // SW  # pixels of this phase
    M = N * LD * LH * LW
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    live = m < M
    m = tl.where(live, m, 0)
    LW1, LH1, LD1 = tl.maximum(LW, 1), tl.maximum(LH, 1), tl.maximum(LD, 1)
    j, i, d = m % LW1, (m // LW1) % LH1, (m // (LW1 * LH1)) % LD1
    n = m // (LW1 * LH1 * LD1)
    od, oh, ow = d + od0, i + oh0, j + ow0
    base = (((n * OD + od) * OH + oh) * OW + ow) * K + group * KG
    c = (tl.program_id(1) % tiles_n) * BN + tl.arange(0, BN)
    kk = tl.arange(0, BK)
    blocks = tl.cdiv(KG, BK)
    rows = (group * CG + c) * (T * R * S * KG)
    acc = tl.zeros((BM, BN), tl.int32)
    for step in range(0, nt * nr * ns * blocks):
        tap = step // blocks
        k = (step % blocks) * BK + kk
        e, a_, b_ = tap // (nr * ns), (tap // ns) % nr, tap % ns
        ed, eh, ew = e * JD, a_ * JH, b_ * JW
        inside = live & (oh >= eh) & (oh - eh < OH) & (ow >= ew) & (ow - ew < OW) & (od >= ed) & (od - ed < OD)
        shift = ((ed * OH + eh) * OW + ew) * K
        a = tl.load(g + base[:, None] + (k - shift)[None, :], mask=inside[:, None] & (k < KG)[None, :], other=0)
        where = ((t0 + e * TD) * R + r0 + a_ * TH) * S + s0 + b_ * TW
        b = tl.load(wt + rows[None, :] + (where * KG + k)[:, None], mask=(c < CG)[None, :] & (k < KG)[:, None], other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    co = group * CG + c
    ok = live[:, None] & (c < CG)[None, :]
    if IMAGES:
        scale = tl.load(factor + (n * FN)[:, None] + (co * FC)[None, :], mask=ok, other=0.0)
    else:
        scale = tl.load(factor + co * FC, mask=c < CG, other=0.0)[None, :]
    p = ((d * SD + pd) * H + i * SH + ph) * W + j * SW + pw
    tl.store(dx + (n * XN + p * XP)[:, None] + (co * XC)[None, :], acc.to(tl.float32) * scale, mask=ok)
