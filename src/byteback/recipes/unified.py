# SPDX-License-Identifier: Apache-2.0
"""Unified INT8 (Zhu et al., CVPR 2020): Direction Sensitive Gradient Clipping and Deviation Counteractive LR Scaling.

    paper            here
    c                clip of grad_output
    g, ĝ             grad_output before and after quantization
    d_c              direction deviation, 1 - cos<g, ĝ>
    c* = argmin d_c  DirectionSensitive.choose, direction_search.py
    φ(d_c), α, β     DeviationCounteractive: factor, alpha, beta
    update period    DirectionSensitive.period

Differences from the paper, and the reasons (`literal` in docs/3-clipping.md does exactly what the paper says):
* The paper finds c by gradient descent and does not give the step size or the number of steps. We search γ = c / max|g| on a
  grid, in two passes over g, or in one pass around the last γ. `solver="gradient-descent"` is available.
* The search assumes the rounding that is used: for stochastic rounding the expected cosine has a closed form
  (direction_search.py). The paper does not say which rounding its search assumes. Rounding to nearest has a larger best clip.
* The paper's period is 100, chosen for the cost of its solver. Ours is 10: better in a short run (docs/3-clipping.md).
* Between two searches the paper keeps c. We keep γ, because max|g| changes from batch to batch and decreases a lot over a run.
  quantize reports max|g| anyway. Only if c differs from γ max|g| by more than a factor `band`, the gradient is quantized again.
* A depthwise convolution sums over no channel, so its gradient has a clip per channel: γ times the channel's maximum. With one
  clip, the norm before it would amplify the noise of channels with small gradients. `depthwise_shares=False` uses one clip, as
  in the paper.
* Three safeguards, each a field for which None means as in the paper. A clip of 0 is never kept: zero-initialised residual
  branches make the first gradients 0. If too much exceeds a kept clip, a new one is searched at once. γ = 1 is tried too, and
  on a tie the larger clip is used: otherwise tensors of equal |g| would be clipped without any gain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from byteback import ops
from byteback.ops.contract.exponential import exponential, exponential_of
from byteback.ops.contract.limits import TINY_CLIP
from byteback.ops.programs import Held
from byteback.ops.quantizer import look
from byteback.quantize import Choice, ClipRule, Memory, TensorRule
from byteback.recipes.direction_search import Curve, descend, golden, grid
from byteback.recipes.recipe import LearningRateRule, Recipe


@dataclass(frozen=True)
class DirectionSensitive(ClipRule):
    """c = argmin 1 - cos<g, ĝ(c)>, searched every `period` iterations (DSGC).

    period                  iterations between two searches (the paper: 100)
    hold                    what is kept between searches: the "clip" c, or the "ratio" γ = c / max|g|
    band                    for hold="ratio": c is kept while it is within this factor of γ max|g|, else it becomes γ max|g|
    solver                  "grid" search, "golden" section search, or "gradient-descent" as in the paper
    evaluations             number of evaluations of d_c in a golden section search
    lowest                  the smallest γ that is tried
    steps, step             number of steps of gradient descent, and the size of the first step in γ
    tie                     deviations that differ by at most this are equal and the larger clip is used; γ = 1 is tried too
    search_after_zero       search again in the next iteration if max|g| was 0
    search_when_saturated   search again at once if more than this share of |g| exceeds the kept clip
    """

    varies_along: ClassVar[tuple[str, ...]] = ("tensor", "K")
    looks_back: ClassVar[bool] = True
    retired: ClassVar[tuple[str, ...]] = ("search_when_grown", "search_when_shrunk")  # fields of earlier versions: see `band`

    period: int = 10
    hold: str = "ratio"
    band: float = 1.5
    solver: str = "grid"
    evaluations: int = 12
    lowest: float = 0.05
    steps: int = 16
    step: float = 0.1
    tie: float | None = 1e-6
    search_after_zero: bool | None = True
    search_when_saturated: float | None = 0.01

    def __post_init__(self) -> None:
        if self.hold not in ("clip", "ratio") or self.solver not in ("grid", "golden", "gradient-descent"):
            raise ValueError(
                f"DirectionSensitive: hold is {self.hold!r} and solver {self.solver!r}; hold is 'clip' or 'ratio', solver "
                "is 'grid', 'golden' or 'gradient-descent'."
            )
        if self.period < 1 or self.evaluations < 2 or self.steps < 1 or not 0.0 < self.lowest < 1.0 or not self.band >= 1.0:
            raise ValueError(
                f"DirectionSensitive: period {self.period}, evaluations {self.evaluations}, steps {self.steps}, lowest "
                f"{self.lowest}, band {self.band}; the first three must be at least 1, 2 and 1, lowest must be between 0 and "
                "1, and band must be at least 1."
            )

    def allows(self, per: str) -> bool:
        """Whether the rule supports this granularity: per tensor, and per channel unless the solver is gradient descent."""
        return per in self.varies_along and (per == "tensor" or self.solver != "gradient-descent")

    def entries(self, scales: int) -> int:
        """Returns how many numbers are remembered: the ratio, then the clips."""
        return 1 + scales

    def choose(self, x: Tensor, axis: int, memory: Memory) -> Choice:
        """Returns the clip of the last search, or a new one if the period is over."""
        due = self._is_due(memory)
        if not due and (self.hold == "clip" or axis == -1):
            return Choice(memory.clip[1:].reshape([-1 if dim == axis else 1 for dim in range(x.dim())]).clone())
        peak = ops.absmax(x, axis)
        if not due:
            return Choice(peak * memory.clip[0])
        largest = look(peak.amax())
        if not math.isfinite(largest):
            return Choice(peak)
        if largest < TINY_CLIP:
            # There is nothing to search. As in the paper, this 0 would be kept for a whole period.
            return Choice(peak) if self.search_after_zero else Choice(peak, remember=_remembered(1.0, peak), searched=True)
        before = memory.numbers(1)[0] if memory.initialized else None
        ratio = self._searched(Curve(x, peak, memory.stochastic), before)
        clip = peak * ratio
        return Choice(clip, remember=_remembered(ratio, clip), searched=True)

    def held(self, memory: Memory) -> Choice | None:
        """Returns the kept clip, or γ for clips per channel; None if the period is over."""
        if self._is_due(memory):
            return None
        if memory.axis == -1 or self.hold == "clip":
            return Choice(memory.clip[1:])
        return Choice(ratio=memory.numbers(1)[0])

    def refit(self, held: Choice, peak: float, memory: Memory) -> Choice | None:
        """Returns γ max|g| if the kept clip differs from it by more than a factor `band`, else None."""
        if held.clip is None or self.hold != "ratio" or held.clip.numel() > 1:
            return None
        ratio, clip = memory.numbers(2)
        fitting = _float32(peak * ratio)
        off = clip / fitting if fitting > 0.0 else 1.0
        if 1.0 / self.band <= off <= self.band:
            return None
        remembered = memory.clip.new_tensor([ratio, fitting])
        return Choice(remembered[1:], remember=remembered)

    def program(self) -> Held | None:
        """What a backend needs to know to hold a clip; None for a class of your own, which may decide in another way."""
        if type(self) is not DirectionSensitive:
            return None
        saturated = math.inf if self.search_when_saturated is None else self.search_when_saturated
        return Held(self.period, self.band if self.hold == "ratio" else 0.0, saturated)

    def _is_due(self, memory: Memory) -> bool:
        return not memory.initialized or memory.iteration - memory.updated_at >= self.period

    def search_period(self) -> int:
        """Returns `period`."""
        return self.period

    def is_stale(self, choice: Choice, saturated: float, peak: float) -> bool:
        """Whether more than `search_when_saturated` of |g| exceeds a kept clip."""
        return not choice.searched and self.search_when_saturated is not None and saturated > self.search_when_saturated

    def _searched(self, curve: Curve, before: float | None) -> float:
        """Returns γ with the smallest deviation. `before` is γ of the last search."""
        if self.solver == "grid":
            return grid(curve, self.lowest, self.tie, before)
        if self.solver == "golden":
            return golden(curve, self.lowest, self.tie, self.evaluations)
        return descend(curve, self.lowest, self.tie, self.steps, self.step)


def _float32(number: float) -> float:
    """Rounds a product of two float32 numbers, which is exact in float64, as float32 arithmetic does."""
    return float(np.float32(number))


def _remembered(ratio: float, clip: Tensor) -> Tensor:
    return torch.cat([clip.new_full((1,), ratio), clip.reshape(-1)])


@dataclass(frozen=True)
class DeviationCounteractive(LearningRateRule):
    """φ(d) = max(exp(-α d), β): lower learning rate for layers with larger direction deviation (DCLRS)."""

    alpha: float = 20.0
    beta: float = 0.1

    def __post_init__(self) -> None:
        if self.alpha < 0.0 or not 0.0 < self.beta <= 1.0:
            raise ValueError(
                f"DeviationCounteractive: alpha is {self.alpha} and beta {self.beta}; alpha must not be negative and beta "
                "must be in (0, 1]."
            )

    def factor(self, deviation: Any) -> Any:
        """Returns φ of a number or of a float64 tensor. The bits are the same on every machine.

        >>> [round(DeviationCounteractive().factor(d), 4) for d in (0.0, 0.01, 0.05, 0.2)]
        [1.0, 0.8187, 0.3679, 0.1]
        """
        if isinstance(deviation, Tensor):
            return exponential_of(deviation * -self.alpha).clamp_min(self.beta)
        return max(exponential(-self.alpha * deviation), self.beta)


@dataclass(frozen=True, kw_only=True)
class UnifiedInt8(Recipe):
    """Clips gradients so that their direction changes least. Lower learning rate for layers with larger direction deviation."""

    slug: ClassVar[str] = "unified-int8"

    grad_output: TensorRule = field(default_factory=lambda: TensorRule(clip=DirectionSensitive(), rounding="stochastic"))
    learning_rate: LearningRateRule | None = field(default_factory=DeviationCounteractive)
