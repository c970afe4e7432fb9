# SPDX-License-Identifier: Apache-2.0
"""Max-pool with its taps, its gradient, and single pixels, in numpy, window by window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

f32 = np.float32


def _windows(window: Any, size: tuple[int, ...]) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
    """Each window with its taps (number, h, w) that lie within the image, in order."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = window[:4]
    rows, columns = window.counts(size)
    for i in range(rows):
        for j in range(columns):
            taps = [(a * kw + b, i * sh - ph + a * dh, j * sw - pw + b * dw) for a in range(kh) for b in range(kw)]
            yield i, j, [tap for tap in taps if 0 <= tap[1] < size[0] and 0 <= tap[2] < size[1]]


def max_pool(x: np.ndarray, window: Any) -> tuple[np.ndarray, np.ndarray]:
    """The largest of each window and which tap it is: the first of equal ones, the last NaN if there is one.

    A window with a dilation may miss a narrow image altogether: then it is -inf, by tap 0.
    """
    n, c, *size = x.shape
    counts = window.counts(size)
    y, which = np.zeros((n, c, *counts), f32), np.zeros((n, c, *counts), np.uint8)
    for i, j, taps in _windows(window, tuple(size)):
        best, chosen = np.full((n, c), -np.inf, f32), np.full((n, c), taps[0][0] if taps else 0)
        for number, h, w in taps:
            better = (x[:, :, h, w] > best) | np.isnan(x[:, :, h, w])
            best, chosen = np.where(better, x[:, :, h, w], best), np.where(better, number, chosen)
        y[:, :, i, j], which[:, :, i, j] = best, chosen
    return y, which


def max_pool_grad(g: np.ndarray, which: np.ndarray, size: tuple[int, ...], window: Any) -> np.ndarray:
    """Each gradient goes to the pixel that its tap names; where several meet they are added in the order of the windows."""
    dx = np.zeros(size, f32)
    for i, j, taps in _windows(window, tuple(size[2:])):
        for number, h, w in taps:
            dx[:, :, h, w] += np.where(which[:, :, i, j] == number, g[:, :, i, j], f32(0))
    return dx


def spread_pixels(y: np.ndarray, size: tuple[int, ...], stride: tuple[int, int]) -> np.ndarray:
    x = np.zeros(size, f32)
    x[:, :, :: stride[0], :: stride[1]] = y
    return x
