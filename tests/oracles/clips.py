# SPDX-License-Identifier: Apache-2.0
"""Magnitude-aware clips, and what a quantizer writes down, in numpy.

σ² = max(Σg²/M - (Σg/M)², 0);  Gaussian where the share of |g| > σ exceeds a threshold
clip = max|g| where Gaussian, at the first time, or where the last clip was 0; else before · keep + max|g| · add
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oracles import statistics

f32, f64 = np.float32, np.float64


def sigma(total: np.ndarray, squares: np.ndarray, count: int) -> np.ndarray:
    mean = total / f64(count)
    return np.sqrt(np.maximum(squares / f64(count) - mean * mean, f64(0))).astype(f32)


def average(rule: Any, peak: np.ndarray, tail: np.ndarray, count: int, before: np.ndarray | None) -> tuple[np.ndarray, float]:
    gaussian = tail.astype(f64) / f64(count) > rule[0]
    if before is None:
        return peak, float(gaussian.mean())
    before = before.reshape(peak.shape)
    averaged = before * f32(rule[1]) + peak * f32(rule[2])
    return np.where(gaussian | (before == 0), peak, averaged).astype(f32), float(gaussian.mean())


def magnitude_clips(
    rule: Any, x: np.ndarray, sums: tuple[np.ndarray, np.ndarray], before_one: Any, before_each: Any
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """The clip of the tensor and those of its channels, and the Gaussian share of each; sums are Σx and Σx², (C,)."""
    rank, count = x.ndim, x.size // x.shape[1]
    each = statistics.column(sigma(*sums, count), rank)
    one = sigma(statistics.tree(sums[0]), statistics.tree(sums[1]), x.size)
    peak = np.abs(statistics.rows_of(x)).max(0)
    tails, all_tails = statistics.tail_count(x, each), statistics.tail_count(x, one).sum(keepdims=True)
    clip, gaussian = average(rule, peak.max().reshape((1,) * rank), all_tails, x.size, before_one)
    clips, gaussian_each = average(rule, statistics.column(peak, rank), tails, count, before_each)
    return clip, clips, gaussian, gaussian_each


def ledger(buffers: dict[str, np.ndarray], slot: int, entry: Any) -> dict[str, np.ndarray]:
    """The buffers after one entry was written into a row."""
    made = {name: buffer.copy() for name, buffer in buffers.items()}

    def fitting(clip: np.ndarray, row: np.ndarray) -> np.ndarray:
        return clip.reshape(-1) if clip.size == row.size else np.full(row.shape, clip.max())

    if entry.remember is not None:
        made["clip"][slot] = fitting(entry.remember.numpy(), made["clip"][slot])
        made["initialized"][slot] = 1
    if entry.searched:
        made["updated_at"][slot] = entry.iteration
    for place, value in enumerate((entry.saturated, entry.deviation, *entry.own)):
        if not np.isnan(value):
            made["observed"][slot, place] = value
    clip = entry.clip.numpy()
    made["observed"][slot, 3] = clip.max()
    if "tracked" in made:
        row = made["tracked"][slot]
        new = fitting(clip, row)
        keep, take = f32(1.0 - entry.momentum), f32(entry.momentum)
        made["tracked"][slot] = row * keep + new * take if buffers["seen"][slot] else new
    made["seen"][slot] = 1
    return made
