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

from byteback.quantize import TensorRule
from byteback.recipes.magnitude_aware import MagnitudeAware
from byteback.recipes.recipe import Recipe


def _magnitude_aware(per: str) -> TensorRule:
    return TensorRule(clip=MagnitudeAware(), rounding="stochastic", per=per)


@dataclass(frozen=True, kw_only=True)
class DistributionAdaptiveInt8(Recipe):
    """Two copies of the gradient: per channel for grad_weight, global for grad_input, each with magnitude-aware clips."""

    slug: ClassVar[str] = "distribution-adaptive-int8"

    grad_output: TensorRule = field(default_factory=lambda: _magnitude_aware("tensor"))
    grad_output_for_weight: TensorRule | None = field(default_factory=lambda: _magnitude_aware("K"))
