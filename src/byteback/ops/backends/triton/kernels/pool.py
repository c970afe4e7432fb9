# SPDX-License-Identifier: Apache-2.0
"""Max-pooling of channels-last images: the maximum of each window with the number of its tap, and the gradient.

A NaN wins, and of equal numbers the first, as in PyTorch. Backward gathers: each input pixel adds the gradients of the windows
that chose it, in the order of the windows.
"""

import triton
import triton.language as tl


@triton.jit
def forward(
    x, y, taps, N, H, W, C, OH, OW, SH, SW, PH, PW, DH, DW,
    R: tl.constexpr, S: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    ow, oh, n = m % OW, (m // OW) % OH, m // (OW * OH)
    best = tl.full((BR, BC), float("-inf"), tl.float32)
    tap = tl.zeros((BR, BC), tl.int32)
    found = tl.zeros((BR, BC), tl.int1)
    for i in range(0, R * S):
        h, w = oh * SH - PH + (i // S) * DH, ow * SW - PW + (i % S) * DW
        ok = ((n < N) & (h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None] & (c < C)[None, :]
        v = tl.load(x + (((n * H + h) * W + w) * C)[:, None] + c[None, :], mask=ok, other=0.0)
        wins = ok & ((v > best) | (v != v) | (found == 0))
        best = tl.where(wins, v, best)
        tap = tl.where(wins, i, tap)
        found = found | ok
    to = (m * C)[:, None] + c[None, :]
    ok = (n < N)[:, None] & (c < C)[None, :]
    tl.store(y + to, best, mask=ok)
    tl.store(taps + to, tap.to(tl.uint8), mask=ok)


@triton.jit
def backward(
    g, taps, dx, N, H, W, C, OH, OW, SH, SW, PH, PW, DH, DW,
    R: tl.constexpr, S: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    w, h, n = m % W, (m // W) % H, m // (W * H)
    acc = tl.zeros((BR, BC), tl.float32)
    for j in range(0, R * S):
        i = R * S - 1 - j  # the last tap belongs to the first window
        zh, zw = h + PH - (i // S) * DH, w + PW - (i % S) * DW
        oh, ow = zh // SH, zw // SW
        hit = (n < N) & (zh >= 0) & (zw >= 0) & (zh % SH == 0) & (zw % SW == 0) & (oh < OH) & (ow < OW)
        ok = hit[:, None] & (c < C)[None, :]
        at = (((n * OH + oh) * OW + ow) * C)[:, None] + c[None, :]
        chosen = ok & (tl.load(taps + at, mask=ok, other=255).to(tl.int32) == i)
        acc = tl.where(chosen, acc + tl.load(g + at, mask=chosen, other=0.0), acc)
    tl.store(dx + (m * C)[:, None] + c[None, :], acc, mask=(n < N)[:, None] & (c < C)[None, :])
