# SPDX-License-Identifier: Apache-2.0
"""output = x ⋆ w as a matrix product: rows are output pixels, columns output channels, the sum runs over taps and channels.

x (N, D, H, W, C), w (K, T·R·S, C/groups), y with the strides YN, YP, YK for image, pixel, channel; all tensors are dense.
IMAGES: there is a factor for each image; one for each channel only takes fewer registers. ROUNDS: y is the bits of bfloat16.
"""

import triton
import triton.language as tl

from byteback.ops.backends.triton.kernels.rounding import to_bfloat16


@triton.jit
def conv_output(
    x, w, y, factor,
    N, D, H, W, C, KG, CG, OD, OH, OW,
    SD, SH, SW, PD, PH, PW, DD, DH, DW,
    YN, YP, YK, FN, FK,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    IMAGES: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    pixels = OD * OH * OW
    M = N * pixels
    pid = tl.program_id(0)
    g = tl.program_id(1)
    # Programs that run at the same time share rows of x and columns of w, which stay in the L2 cache.
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(KG, BN)
    width = GROUP * tiles_n
    first = (pid // width) * GROUP
    size = min(tiles_m - first, GROUP)
    pm, pn = first + (pid % width) % size, (pid % width) // size

    m = pm * BM + tl.arange(0, BM)
    n, p = m // pixels, m % pixels
    ow, oh, od = p % OW, (p // OW) % OH, p // (OW * OH)
    id0, ih0, iw0 = od * SD - PD, oh * SH - PH, ow * SW - PW
    base = (((n * D + id0) * H + ih0) * W + iw0) * C + g * CG
    k = pn * BN + tl.arange(0, BN)
    cc = tl.arange(0, BK)
    blocks = tl.cdiv(CG, BK)
    rows = (g * KG + k) * (T * R * S * CG)
    acc = tl.zeros((BM, BN), tl.int32)
    for i in range(0, T * R * S * blocks):
        tap = i // blocks
        c = (i % blocks) * BK + cc
        t, r, s = tap // (R * S), (tap // S) % R, tap % S
        ih, iw = ih0 + r * DH, iw0 + s * DW
        inside = (m < M) & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
        if T > 1:
            inside = inside & (id0 + t * DD >= 0) & (id0 + t * DD < D)
        else:
            inside = inside & (id0 >= 0) & (id0 < D)
        shift = ((t * DD * H + r * DH) * W + s * DW) * C
        a = tl.load(x + base[:, None] + (shift + c)[None, :], mask=inside[:, None] & (c < CG)[None, :], other=0)
        b = tl.load(w + rows[None, :] + (tap * CG + c)[:, None], mask=(k < KG)[None, :] & (c < CG)[:, None], other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    ko = g * KG + k
    ok = (m < M)[:, None] & (k < KG)[None, :]
    if IMAGES:
        scale = tl.load(factor + (n * FN)[:, None] + (ko * FK)[None, :], mask=ok, other=0.0)
    else:
        scale = tl.load(factor + ko * FK, mask=k < KG, other=0.0)[None, :]
    value = acc.to(tl.float32) * scale
    if ROUNDS:
        value = to_bfloat16(value)
    tl.store(y + (n * YN + p * YP)[:, None] + (ko * YK)[None, :], value, mask=ok)
