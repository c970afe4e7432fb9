# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a norm per channel, in numpy float64; a, b, q and r are rounded to float32 once.

forward   mean = Σx / M,  var = max(Σx²/M - mean², 0),  invstd = 1 / sqrt(var + eps),  a = gamma·invstd,  b = beta - mean·a
backward  grad_gamma = (Σg·x - mean·Σg)·invstd,  q = -a·invstd·grad_gamma / M,  r = -a·Σg / M - q·mean
"""

from __future__ import annotations

import numpy as np

from oracles.quantize import is_live

f32, f64 = np.float32, np.float64
CEILINGS = {"none": np.inf, "relu": np.inf, "relu6": 6.0}

Vector = np.ndarray | None


def norm_coefficients(
    stats: tuple[np.ndarray, ...],
    count: int,
    gamma: Vector,
    beta: Vector,
    bias: Vector,
    eps: float,
    running: tuple[np.ndarray, np.ndarray] | None,
    momentum: float,
    activation: str,
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, np.ndarray] | None]:
    """(a, b, mean, invstd, peak) and the running statistics after the step."""
    total, squares, low, high = stats
    mean = total / f64(count)
    var = np.maximum(squares / f64(count) - mean * mean, f64(0))
    moved = None
    if running is not None:
        seen = (mean if bias is None else mean + bias.astype(f64)).astype(f32)
        unbiased = (var * (f64(count) / f64(count - 1) if count > 1 else f64(0))).astype(f32)
        keep, take = f32(1.0 - momentum), f32(momentum)
        moved = running[0] * keep + seen * take, running[1] * keep + unbiased * take
    invstd = f64(1) / np.sqrt(var + f64(eps))
    a, b = _line(mean, invstd, gamma, beta)
    ends = np.stack([low, high]) * a + b
    if activation != "none":
        ends = np.clip(ends, f32(0), f32(CEILINGS.get(activation, np.inf)))
    return (a, b, mean, invstd, np.asarray(np.abs(ends).max())), moved


def _line(mean: np.ndarray, invstd: np.ndarray, gamma: Vector, beta: Vector) -> tuple[np.ndarray, np.ndarray]:
    a = (invstd if gamma is None else gamma.astype(f64) * invstd).astype(f32)
    shift = mean * a.astype(f64)
    return a, (-shift if beta is None else beta.astype(f64) - shift).astype(f32)


def norm_folded(
    mean: np.ndarray, var: np.ndarray, gamma: Vector, beta: Vector, bias: Vector, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    centre = mean.astype(f64) if bias is None else mean.astype(f64) - bias.astype(f64)
    return _line(centre, f64(1) / np.sqrt(var.astype(f64) + f64(eps)), gamma, beta)


def norm_gradient(
    a: np.ndarray, mean: np.ndarray, invstd: np.ndarray, total: np.ndarray, dot: np.ndarray, count: int
) -> tuple[np.ndarray, ...]:
    """q, r, grad_gamma, grad_beta."""
    wide, share = a.astype(f64), f64(-1) / f64(count)
    gamma = (dot - mean * total) * invstd
    q = (wide * invstd * gamma * share).astype(f32)
    r = (wide * total * share - q.astype(f64) * mean).astype(f32)
    return q, r, gamma.astype(f32), total.astype(f32)


def gradient_sums(
    a: np.ndarray,
    q: np.ndarray,
    r: np.ndarray,
    mean: np.ndarray,
    invstd: np.ndarray,
    eps: float,
    total: np.ndarray,
    dot: np.ndarray,
    squares: np.ndarray,
    count: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Σdx and Σdx² of dx = a·g + q·x + r, without a reading of it."""
    a, q, r, m = a.astype(f64), q.astype(f64), r.astype(f64), f64(count)
    var = np.maximum(f64(1) / (invstd * invstd) - f64(eps), f64(0))
    shift, centred = q * mean + r, dot - mean * total
    own = (a * a * squares + m * (q * q * var)) + m * (shift * shift)
    return a * total + m * shift, own + f64(2) * (a * q * centred + a * shift * total)


def norm_step(low: np.ndarray, high: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """How far apart the int8 values of a channel are: the farther extreme is 127 steps from the centre."""
    reach = np.maximum(np.abs(low - centre), np.abs(high - centre))
    return np.where(is_live(reach), reach / f32(127), f32(1)).astype(f32)
