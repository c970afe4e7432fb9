# SPDX-License-Identifier: Apache-2.0
"""Statistics in numpy float64, with the contract's order of additions.

A channel's rows (pixels in N, (D,) H, W order) are added one after the other in blocks of 64; blocks are added as a halving
tree (block i with block i + n/2, n a power of two, missing blocks are 0), and channels by the same tree.
"""

from __future__ import annotations

import numpy as np

from oracles.quantize import absmax, is_live, nearest

f64 = np.float64


def tree(parts: np.ndarray) -> np.ndarray:
    """The halving-tree sum along the first axis."""
    count = 1
    while count < parts.shape[0]:
        count *= 2
    parts = np.concatenate([parts, np.zeros((count - parts.shape[0], *parts.shape[1:]), parts.dtype)])
    while count > 1:
        count //= 2
        parts = parts[:count] + parts[count:]
    return parts[0]


def rows_of(x: np.ndarray) -> np.ndarray:
    """(N, C, ...) as (rows, C)."""
    return np.moveaxis(x, 1, -1).reshape(-1, x.shape[1])


def ordered_sum(rows: np.ndarray) -> np.ndarray:
    """The sum of each column of (rows, C), all blocks side by side; a block begins with its first row, missing rows are +0."""
    missing = -rows.shape[0] % 64
    blocks = np.concatenate([rows, np.zeros((missing, rows.shape[1]), f64)]).reshape(-1, 64, rows.shape[1])
    total = blocks[:, 0]
    for row in range(1, 64):
        total = total + blocks[:, row]
    return tree(total) if len(total) else np.zeros(rows.shape[1], f64)


def sum_all(rows: np.ndarray) -> np.ndarray:
    return tree(ordered_sum(rows))


def column(vector: np.ndarray, rank: int) -> np.ndarray:
    """(C,) as (1, C, 1, ...)."""
    return vector.reshape(1, -1, *(1,) * (rank - 2))


def moments(x: np.ndarray) -> tuple[np.ndarray, ...]:
    """max|x|, Σx, Σx², each (1, C, 1, ...)."""
    rows = rows_of(x).astype(f64)
    return absmax(x, 1), column(ordered_sum(rows), x.ndim), column(ordered_sum(rows * rows), x.ndim)


def channel_stats(x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Σx, Σx², min x, max x of each channel, (C,); an extreme that is zero is +0."""
    rows = rows_of(x)
    wide = rows.astype(f64)
    low, high = rows.min(0) + np.float32(0), rows.max(0) + np.float32(0)
    return ordered_sum(wide), ordered_sum(wide * wide), low, high


def tail_count(x: np.ndarray, threshold: np.ndarray) -> np.ndarray:
    over = rows_of(np.broadcast_to(np.abs(x) > threshold, x.shape)).sum(0, dtype=np.int64)
    return column(over, x.ndim)


def dot_terms(x: np.ndarray, values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """(x·x̂, x̂·x̂, x·x), x̂ = values · scale; a scale that a channel has to itself multiplies the channel's sums."""
    rows, q = rows_of(x).astype(f64), rows_of(values).astype(f64)
    wide = scale.astype(f64)
    if scale.size == scale.shape[1]:
        each = wide.reshape(-1)
        first, second = ordered_sum(rows * q) * each, ordered_sum(q * q) * (each * each)
        return np.array([tree(first), tree(second), sum_all(rows * rows)])
    back = rows_of(values.astype(f64) * wide)
    return np.array([sum_all(rows * back), sum_all(back * back), sum_all(rows * rows)])


def channel_cosine_terms(x: np.ndarray, clips: np.ndarray, stochastic: bool) -> np.ndarray:
    """x·q, q·q and x·x of each channel, for rows of clips (candidates, C or 1): (candidates, 3, C).

    Stochastic rounding makes ⌊y⌋ + 1 of y = 127 x / clip with probability y - ⌊y⌋; these are the means of both sums.
    """
    rows = rows_of(x)
    wide = rows.astype(f64)
    terms = np.zeros((len(clips), 3, rows.shape[1]), f64)
    for own, each in zip(terms, clips, strict=True):
        for channel, clip in enumerate(np.broadcast_to(each, rows.shape[1:])):
            column_, values = rows[:, channel], wide[:, channel]
            if stochastic:
                rate = np.float32(127) / clip if is_live(clip) else np.float32(0)
                with np.errstate(invalid="ignore", over="ignore"):
                    y = np.abs(column_) * rate
                y = np.where(y > 127, np.float32(127), y).astype(f64) if is_live(clip) else np.zeros_like(values)
                floor = np.floor(y)
                up, down = (floor + 1) ** 2, floor**2
                products, squares = np.abs(values) * y, down + (y - floor) * (up - down)
            else:
                q = nearest(column_, clip).astype(f64)
                products, squares = values * q, q * q
            own[:, channel] = [ordered_sum(part[:, None])[0] for part in (products, squares, values * values)]
    return terms


def cosine_terms(x: np.ndarray, clips: np.ndarray, stochastic: bool) -> np.ndarray:
    """A row (x·q, q·q, x·x) for each clip."""
    each = channel_cosine_terms(x, clips.reshape(-1, 1), stochastic)
    return np.array([[tree(term) for term in terms] for terms in each], f64).reshape(len(clips), 3)


def cosine_slope_terms(x: np.ndarray, clip: np.ndarray) -> np.ndarray:
    """(x·q, q·q, x·x, x·d, q·d), d = q beyond the clip, else q - 127 x / clip; 0 where the clip counts as zero."""
    rows = rows_of(x)
    wide, q = rows.astype(f64), nearest(rows, clip).astype(f64)
    xq, qq, xx = sum_all(wide * q), (q * q).sum(), sum_all(wide * wide)
    if not is_live(clip):
        return np.array([xq, qq, xx, 0.0, 0.0])
    beyond = np.abs(rows) > clip
    rate = f64(127) / f64(clip)
    xd = xq - rate * (xx - sum_all(np.where(beyond, wide * wide, 0.0)))
    qd = qq - rate * (xq - sum_all(np.where(beyond, wide * q, 0.0)))
    return np.array([xq, qq, xx, xd, qd])
