# SPDX-License-Identifier: Apache-2.0
"""Distribution Adaptive INT8 (Zhao et al., AAAI 2021): Gradient Vectorized Quantization, Magnitude-aware Clipping.

    paper                    here
    G for G_W, per channel   grad_output_for_weight, per="K"
    G for G_X, global        grad_output
    s̄, |g|_max, σ            clip, max|g|, the standard deviation of a channel (population, about its mean)
    P(|g| > σ), λ            share of the tail, MagnitudeAware.threshold
    k, A                     MagnitudeAware.k, MagnitudeAware.a

    s̄_t = |g|_max                              where P(|g| > σ) > λ    (Gaussian)
    s̄_t = (1 - kA) s̄_{t-1} + A |g|_max         else                    (inverted T)

Where we differ from the paper, and why:
* It does not say which layers stay float, nor how weights and activations are clipped; both are as in the first paper.
* The paper does not say how the global copy is clipped; we apply the same rule to the whole tensor.
* It prints plain rounding for gradients; we round stochastically (switchable), which keeps their mean.
* Behind a fused BatchNorm σ follows from the sums that its gradient needs anyway (ops.gradient_sums), in exact arithmetic the
  same number: the gradient is then read once less.
* In a depthwise convolution no product sums over K, so the copy per channel serves grad_input too: finer steps, and one copy
  less to make. `Recipe.depthwise_shares = False` is the paper's letter.
* A channel that was Gaussian at t hands |g|_max on as its s̄_t, so that the average never restarts from a stale value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from byteback import ops
from byteback.ops import magnitude
from byteback.quantize import Choice, ClipRule, Memory, TensorRule
from byteback.recipes.recipe import Recipe


@dataclass(frozen=True)
class MagnitudeAware(ClipRule):
    """max|g| for Gaussian gradients; for long-tailed (inverted T) ones a damped average of it (MCS).

    threshold   λ: the share of |g| > σ above which a channel counts as Gaussian
    k, a        of the average: s̄_t = (1 - k a) s̄_{t-1} + a |g|_max
    """

    varies_along: ClassVar[tuple[str, ...]] = ("tensor", "K")
    looks_back: ClassVar[bool] = True

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
        clip, gaussian = magnitude.average(self.averages(), peak, tail, count, before)
        return Choice(clip, remember=clip, gaussian_share=gaussian)

    def averages(self) -> magnitude.Average:
        """Clips of two copies can be chosen together, with both tails counted in one reading."""
        return magnitude.Average(self.threshold, 1.0 - self.k * self.a, self.a)


def _magnitude_aware(per: str) -> TensorRule:
    return TensorRule(clip=MagnitudeAware(), rounding="stochastic", per=per)


@dataclass(frozen=True, kw_only=True)
class DistributionAdaptiveInt8(Recipe):
    """Two copies of the gradient: per channel for grad_weight, global for grad_input, each with magnitude-aware clips."""

    slug: ClassVar[str] = "distribution-adaptive-int8"

    grad_output: TensorRule = field(default_factory=lambda: _magnitude_aware("tensor"))
    grad_output_for_weight: TensorRule | None = field(default_factory=lambda: _magnitude_aware("K"))
