# SPDX-License-Identifier: Apache-2.0
"""Magnitude-aware Clipping (Zhao et al., AAAI 2021): the clip is max|g| or an average of it, by the distribution of g.

`distribution_adaptive.py` lists the paper's symbols and our differences from the paper.
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
    """Clips Gaussian gradients at max|g|, and long-tailed (inverted T) gradients at a damped average of max|g| (MCS).

    threshold   λ: a channel is Gaussian if the share of |g| > σ is above this
    k, a        factors of the average: s̄_t = (1 - k a) s̄_{t-1} + a |g|_max

    The diagnostic gaussian_share is the share of scales whose gradients are Gaussian by this test.
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
                f"MagnitudeAware: threshold is {self.threshold}, k {self.k}, a {self.a}; threshold and k·a must be in "
                "[0, 1] and a must be positive, otherwise clips could become negative."
            )

    def choose(self, x: Tensor, axis: int, memory: Memory) -> Choice:
        """Returns the clip of each channel, or of the whole tensor (axis -1)."""
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
        """Returns a program: a backend chooses the clips of both copies together and counts both tails in one pass."""
        return Averaged(self.threshold, 1.0 - self.k * self.a, self.a)
