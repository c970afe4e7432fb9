# SPDX-License-Identifier: Apache-2.0
"""Magnitude-aware Clipping (Zhao et al., AAAI 2021): by the shape of a gradient's distribution, max|g| or an average of it.

`distribution_adaptive.py` has the paper's symbols, and where we differ from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from byteback import ops
from byteback.ops import magnitude
from byteback.ops.programs import Averaged
from byteback.quantize import Choice, ClipRule, Memory


@dataclass(frozen=True)
class MagnitudeAware(ClipRule):
    """max|g| for Gaussian gradients; for long-tailed (inverted T) ones a damped average of it (MCS).

    threshold   λ: the share of |g| > σ above which a channel counts as Gaussian
    k, a        of the average: s̄_t = (1 - k a) s̄_{t-1} + a |g|_max

    Its diagnostic, gaussian_share, is the part of the scales whose gradients looked Gaussian.
    """

    varies_along: ClassVar[tuple[str, ...]] = ("tensor", "K")
    looks_back: ClassVar[bool] = True
    diagnostics: ClassVar[tuple[str, ...]] = ("gaussian_share",)

    threshold: float = 0.3
    k: float = 1.0
    a: float = 0.8

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0 or not self.a > 0.0 or not 0.0 <= self.k * self.a <= 1.0:
            raise ValueError(
                f"MagnitudeAware: threshold is {self.threshold}, k {self.k}, a {self.a}; threshold and k·a must lie in "
                "[0, 1] and a must be positive, or clips could turn negative."
            )

    def choose(self, x: Tensor, axis: int, memory: Memory) -> Choice:
        """The clip of each channel, or of the whole tensor (axis -1)."""
        peak, total, squares = ops.moments(x)  # each (1, C, 1, ...)
        count = x.numel() // max(x.shape[1], 1)
        if axis == -1:
            peak, total, squares = ops.absmax(peak), ops.sum_channels(total), ops.sum_channels(squares)
            count = x.numel()
        tail = ops.tail_count(x, magnitude.sigma(total, squares, count))
        tail = tail if axis == 1 else tail.sum(dim=1, keepdim=True)
        before = memory.clip if memory.initialized else None
        clip, gaussian = magnitude.average(self.program(), peak, tail, count, before)
        return Choice(clip, remember=clip, diagnostics=(gaussian,))

    def program(self) -> Averaged:
        """Clips of two copies can be chosen together, with both tails counted in one reading."""
        return Averaged(self.threshold, 1.0 - self.k * self.a, self.a)
