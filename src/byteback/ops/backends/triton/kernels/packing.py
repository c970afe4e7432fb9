# SPDX-License-Identifier: Apache-2.0
"""Passes that also write their integers packed by 16 images, for grad_weight (conv_grad_weight.py).

The rows of a tensor are its pixels in N, (D,) H, W order. A tile of an ordinary pass has BR rows that follow each other. With
PACKS it has the same BR / 16 pixels of 16 images, the images of a pixel side by side. So all 16 bytes of a group are in one
tile, and the floats are read once for both copies.
"""

import triton
import triton.language as tl

GROUP = 16
_G = tl.constexpr(GROUP)


@triton.jit
def rows_of(block, P, BR: tl.constexpr, PACKS: tl.constexpr):
    """Returns the rows of a tile, and whether each is a pixel of an image. P is the number of pixels of an image."""
    i = tl.arange(0, BR)
    row = block * BR + i
    is_pixel = row >= 0
    if PACKS:
        B: tl.constexpr = BR // _G
        tiles = tl.cdiv(P, B)
        p = block % tiles * B + i // _G
        row = (block // tiles * _G + i % _G) * P + p
        is_pixel = p < P
    return row, is_pixel


@triton.jit
def store_packed(packed, v, block, c, P, C, BR: tl.constexpr, BC: tl.constexpr):
    """Stores int8 values (BR, BC) of a tile with PACKS. c are its channels, (BC,)."""
    B: tl.constexpr = BR // _G
    tiles = tl.cdiv(P, B)
    p = block % tiles * B + tl.arange(0, B)
    v = tl.permute(tl.reshape(v, (B, _G, BC)), (0, 2, 1))
    at = (block // tiles * P + p)[:, None, None] * C + c[None, :, None]
    tl.store(packed + at * _G + tl.arange(0, _G)[None, None, :], v, mask=(p < P)[:, None, None] & (c < C)[None, :, None])
