# SPDX-License-Identifier: Apache-2.0
"""Quantization in numpy float32: y = x · (127 / clip) within ±127, rounded half to even or by the noise of a key.

Legend: x is (N, C, ...), clips broadcast over it; a key is two words of 32 bits or None. Every operation rounds once.
"""

from __future__ import annotations

import numpy as np

f32 = np.float32
TINY_CLIP = f32(2.0**-100)


def is_live(clip: np.ndarray) -> np.ndarray:
    """Whether a clip counts: not so small that it means zero, not infinite, not NaN."""
    return (clip >= TINY_CLIP) & (clip < np.inf)


def scale_of(clip: np.ndarray) -> np.ndarray:
    return np.where(is_live(clip), clip / f32(127), f32(1)).astype(f32)


def absmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """max|x| with ones in the place of every axis but `axis`; NaN where any element is."""
    others = tuple(dim for dim in range(x.ndim) if dim != axis)
    return np.abs(x).max(axis=others, keepdims=True) if others else np.abs(x)


def mix32(h: np.ndarray) -> np.ndarray:
    """murmur3's finalizer; uint32 wraps around."""
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def uniform(shape: tuple[int, ...], key: tuple[int, int]) -> np.ndarray:
    """u of every element: pairs of channels are counted in N, ..., C order, and each pair has one hash."""
    n, c, *spatial = shape
    pairs = (c + 1) // 2
    pixel = np.arange(n * int(np.prod(spatial)), dtype=np.uint64)[:, None]
    channel = np.arange(c, dtype=np.uint64)[None, :]
    index = pixel * np.uint64(pairs) + channel // np.uint64(2)
    word = (index * np.uint64(0x9E3779B1) + np.uint64(key[0])).astype(np.uint32) ^ np.uint32(key[1])
    h = mix32(word)
    half = np.where(channel % np.uint64(2) == 0, h & np.uint32(0xFFFF), h >> np.uint32(16))
    u = (half.astype(f32) + f32(0.5)) * f32(2.0**-16)
    return np.moveaxis(u.reshape(n, *spatial, c), -1, 1)


def nearest(x: np.ndarray, clip: np.ndarray) -> np.ndarray:
    """The integers of round-to-nearest as float32; a NaN stays one, all are 0 where the clip counts as zero."""
    live = is_live(clip)
    y = np.clip(x * (f32(127) / np.where(live, clip, f32(1))), f32(-127), f32(127))
    return np.where(live, np.rint(y), f32(0)).astype(f32)


def quantize(
    x: np.ndarray, clip: np.ndarray, key: tuple[int, int] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """values, scale, (saturated, non-finite), max|x|."""
    live = is_live(clip)
    y = np.clip(x * (f32(127) / np.where(live, clip, f32(1)).astype(f32)), f32(-127), f32(127))
    y = np.rint(y) if key is None else np.floor(y + uniform(x.shape, key))
    values = np.where(live & ~np.isnan(x), y, f32(0)).astype(np.int8)
    saturated = int(((np.abs(x) > clip) & live).sum())
    counts = np.array([saturated, int((~np.isfinite(x)).sum())], dtype=np.int64)
    return values, scale_of(clip), counts, np.asarray(absmax(x).reshape(()))


def quantize_max(x: np.ndarray, axis: int, key: tuple[int, int] | None) -> tuple[np.ndarray, ...]:
    """values, scale, clip, counts."""
    clip = absmax(x, axis)
    values, scale, counts, _ = quantize(x, clip, key)
    return values, scale, clip, counts


def noise_key(seed: int, layer: int, count: int, rank: int) -> np.ndarray:
    """The first two words of Philox 4x32-10: key = seed, counter = (count, layer, rank)."""
    word = 2**32
    k, c = [seed % word, seed // word % word], [count % word, count // word % word, layer % word, rank % word]
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [right // word ^ c[1] ^ k[0], right % word, left // word ^ c[3] ^ k[1], left % word]
        k = [(k[0] + 0x9E3779B9) % word, (k[1] + 0xBB67AE85) % word]
    return np.array(c[:2], dtype=np.int64)
