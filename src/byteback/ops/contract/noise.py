# SPDX-License-Identifier: Apache-2.0
"""The noise of stochastic rounding: a function of (seed, rank, layer, count, element), not of threads or layout.

    key of a gradient   Philox 4x32-10, key = seed, counter = (count, layer, rank), its first two words (k0, k1)
    an element pair     h = mix32((index * 0x9E3779B1 + k0) ^ k1), index counting channel pairs in N, (D,) H, W, C order
    an element          u = (h16 + 0.5) / 65536, h16 the low half of h for an even channel, the high half for an odd one

Philox computes one key per gradient, and a cheap hash computes the noise of each element: Philox for each element would take as
long as the quantization itself. u is strictly between 0 and 1, so floor(y + u) does not change integers, in particular not 0.
Only the low 32 bits of the words of a key are used, whatever the upper bits of the int64 are.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_PAIR_STRIDE = 0x9E3779B1


def philox4x32(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32 with ten rounds (Salmon et al. 2011).

    >>> [hex(word) for word in philox4x32((0, 0), (0, 0, 0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def key_words(seed: int, rank: int, layer: int, count: int) -> tuple[int, int]:
    """Returns the 64-bit key (k0, k1) of one gradient."""
    seed_words = (seed & _MASK, (seed >> 32) & _MASK)
    counter = (count & _MASK, (count >> 32) & _MASK, layer & _MASK, rank & _MASK)
    return philox4x32(seed_words, counter)[:2]


def _mix32(h: Tensor) -> Tensor:
    """The finalizer of murmur3, on uint32 values stored in int64."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def uniform_like(x: Tensor, key: Tensor) -> Tensor:
    """Returns u for every element of x (N, C, ...), in the shape of x."""
    n, c, *spatial = x.shape
    pairs = (c + 1) // 2
    pixels = n
    for size in spatial:
        pixels *= size
    k0, k1 = (key & _MASK).unbind()
    index = torch.arange(pixels * pairs, device=x.device)
    h = _mix32((((index * _PAIR_STRIDE) + k0) & _MASK) ^ k1)
    halves = torch.stack((h & 0xFFFF, h >> 16), dim=-1).reshape(pixels, 2 * pairs)[:, :c]
    u = (halves.to(torch.float32) + 0.5) * (1.0 / 65536.0)
    return u.reshape(n, *spatial, c).movedim(-1, 1)
