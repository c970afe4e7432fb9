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

Differences from the paper, and the reasons:
* The paper does not say which layers stay float, nor how weights and activations are clipped. Both are as in the first paper.
* The paper does not say how the global copy is clipped. We apply the same rule to the whole tensor.
* The paper rounds gradients to nearest. We round stochastically by default, which preserves their mean.
* After a fused BatchNorm, σ is computed from the sums that its gradient needs anyway (ops.gradient_sums). In exact arithmetic
  it is the same number, and the gradient is read one time less.
* In a depthwise convolution no product sums over K, so the copy per channel is also used for grad_input: it is quantized more
  finely, and one copy less is made. `Recipe.depthwise_shares = False` does exactly what the paper says.
* For a channel that was Gaussian at step t, s̄_t is |g|_max, so that the average never continues from an outdated value.
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
    """Quantizes the gradient twice with magnitude-aware clips: per channel for grad_weight, per tensor for grad_input."""

    slug: ClassVar[str] = "distribution-adaptive-int8"

    grad_output: TensorRule = field(default_factory=lambda: _magnitude_aware("tensor"))
    grad_output_for_weight: TensorRule | None = field(default_factory=lambda: _magnitude_aware("K"))
