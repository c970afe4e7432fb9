# SPDX-License-Identifier: Apache-2.0
"""Three ways to find γ = c / max|g| with the smallest direction deviation d(γ) = 1 - cos<g, ĝ>.

    grid      evaluates a few candidates in one pass over g. Needs two passes, or one if a γ is known. Then fits a parabola
              through the best three
    golden    golden section search: one pass per evaluation
    descend   gradient descent, as in the first paper: one pass per step

With stochastic rounding, d is the expected deviation, which is smooth in γ: E[x·q] = x·y and E[q·q] = Σ (y² + f (1 - f)), where
y is the number before rounding and f its fractional part. With rounding to nearest, d is not smooth on a fine scale.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from byteback import ops
from byteback.ops.contract.limits import QMAX
from byteback.ops.quantizer import look
from byteback.quantize import deviation_of

_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
# The code below uses no logarithm and no power: their results differ between math libraries, and integers depend on the ratio.
_COARSE = 0.65  # from one γ of the coarse grid to the next: eight of them reach 0.05
_FINE = 8  # candidates of the fine grid, between the neighbours of the best
_NEAR = (0.7, 0.84, 1.0, 1.2, 1.43)  # factors on the γ of the last search


class Curve(NamedTuple):
    """The function d(γ) of a tensor. The clip is γ max|g|; with clips per channel it is γ times the maximum of each channel."""

    x: Tensor
    peak: Tensor
    stochastic: bool

    def deviations(self, ratios: list[float]) -> list[float]:
        """Returns d for each γ."""
        tried = torch.tensor(ratios, dtype=torch.float32, device=self.x.device)
        if self.peak.numel() == 1:
            terms = ops.cosine_terms(self.x, self.peak.reshape(1) * tried, self.stochastic)
        else:
            clips = self.peak.reshape(1, -1) * tried.reshape(-1, 1)
            scale = (clips / clips.new_full((), float(QMAX))).double()
            own = ops.channel_cosine_terms(self.x, clips, self.stochastic)  # (candidates, 3, C)
            factors = torch.stack([scale, scale * scale, torch.ones_like(scale)], dim=1)
            terms = ops.sum_last(own * factors)
        return [deviation_of(*row) for row in look(terms)]

    def slope(self, ratio: float) -> tuple[float, float]:
        """Returns d at γ with rounding to nearest, and ∂d/∂c times a positive number."""
        xq, qq, xx, xd, qd = look(ops.cosine_slope_terms(self.x, (self.peak * ratio).reshape(())))
        return deviation_of(xq, qq, xx), -(xd * qq - xq * qd)


def grid(curve: Curve, lowest: float, tie: float | None, around: float | None = None) -> float:
    """Returns γ in [lowest, 1] by grid search.

    If `around` is given, first tries a small grid around that γ, and accepts its minimum unless it is at an end of the grid
    below 1. Otherwise searches a coarse grid over the whole range, then a fine grid around the best candidate.
    """
    if around is not None:
        ratios = sorted({min(max(around * factor, lowest), 1.0) for factor in _NEAR})
        tried = dict(zip(ratios, curve.deviations(ratios), strict=True))
        best = _best(tried, tie)
        if best == 1.0 or min(ratios) < best < max(ratios):
            return _vertex(tried, best)
    ratios = [1.0]
    while ratios[-1] * _COARSE > lowest:
        ratios.append(ratios[-1] * _COARSE)
    tried = dict(zip(ratios, curve.deviations(ratios), strict=True))
    best = _best(tried, tie)
    low, high = max(best * _COARSE, lowest), min(best / _COARSE, 1.0)
    finer = [low + (high - low) * step / (_FINE + 1) for step in range(1, _FINE + 1)]
    tried.update(zip(finer, curve.deviations(finer), strict=True))
    return _vertex(tried, _best(tried, tie))


def golden(curve: Curve, lowest: float, tie: float | None, evaluations: int) -> float:
    """Returns γ in [lowest, 1] by golden section search."""
    low, high = lowest, 1.0
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    ratios = [left, right] + ([1.0] if tie is not None else [])
    tried = dict(zip(ratios, curve.deviations(ratios), strict=True))
    for _ in range(evaluations - 2):
        if tried[left] <= tried[right]:
            high, right = right, left
            left = probe = high - _GOLDEN * (high - low)
        else:
            low, left = left, right
            right = probe = low + _GOLDEN * (high - low)
        tried[probe] = curve.deviations([probe])[0]
    return _best(tried, tie)


def descend(curve: Curve, lowest: float, tie: float | None, steps: int, step: float) -> float:
    """Returns γ in [lowest, 1] by descent along the sign of ∂d/∂c. The step is halved each time the sign changes."""
    ratio, before, last = 1.0, 0.0, 1.0
    tried: dict[float, float] = {}
    for _ in range(steps):
        tried[ratio], slope = curve.slope(ratio)
        sign = math.copysign(1.0, slope) if slope else 0.0
        step = step / 2.0 if sign * before < 0.0 else step
        last, ratio = ratio, min(1.0, max(lowest, ratio - step * sign))
        before = sign
        if ratio == last:
            break
    return _best(tried, tie) if tie is not None else last


def _best(tried: dict[float, float], tie: float | None) -> float:
    least = min(tried.values())
    return max(ratio for ratio, deviation in tried.items() if deviation <= least + (tie or 0.0))


def _vertex(tried: dict[float, float], best: float) -> float:
    """Returns the minimum of the parabola through `best` and its neighbours; `best` itself at an end or on a tie."""
    ratios = sorted(tried)
    at = ratios.index(best)
    if at in (0, len(ratios) - 1):
        return best
    u, v = ratios[at - 1] - best, ratios[at + 1] - best
    down, up = tried[ratios[at - 1]] - tried[best], tried[ratios[at + 1]] - tried[best]
    if down <= 0.0 or up <= 0.0:
        return best
    return best + (u * u * up - v * v * down) / (2.0 * (u * up - v * down))
