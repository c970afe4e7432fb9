# SPDX-License-Identifier: Apache-2.0
"""Unified INT8 (Zhu et al., CVPR 2020): Direction Sensitive Gradient Clipping and Deviation Counteractive LR Scaling.

    paper            here
    c                clip of grad_output
    g, ĝ             grad_output and its quantized self
    d_c              direction deviation, 1 - cos<g, ĝ>
    c* = argmin d_c  DirectionSensitive.choose, direction_search.py
    φ(d_c), α, β     DeviationCounteractive: factor, alpha, beta
    update period    DirectionSensitive.period

Where we differ from the paper, and why (`literal` in docs/3-clipping.md is the paper's letter):
* The paper learns c by gradient descent and leaves step size and number of steps open. We search γ = c / max|g| on a grid,
  in two readings of g, or in one around the last γ; `solver="gradient-descent"` is there.
* We search for the rounding that is used: of stochastic rounding the expected cosine has a closed form (direction_search.py).
  The paper does not say which rounding its search assumes; nearest has its best clip higher.
* Its period is 100, chosen for the cost of its solver. Ours is 10: a short run was better for it (docs/3-clipping.md).
* Between two searches the paper holds c. We hold γ: max|g| moves from batch to batch, and over a run it shrinks a lot. quantize
  reports max|g| anyway; only where c is off γ max|g| by more than `band` is the gradient quantized a second time.
* A depthwise convolution sums over no channel, so its gradient has a clip per channel, γ times the channel's maximum: with one
  clip the noise of quiet channels would be blown up by the norm before them. `depthwise_shares=False` is the paper's letter.
* Three safeguards, each a field whose None is the literal paper: a clip of 0 is never held (zero-initialised residual
  branches make the first gradients vanish); a held clip that cuts off too much is searched again at once; γ = 1 is tried too,
  and on a tie the larger clip wins (else tensors of equal |g| shrink for nothing).
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
    hold                    between searches keep the "clip" c, or the "ratio" γ = c / max|g|
    band                    a held ratio: c is kept as long as it is within this factor of γ max|g|, else it becomes γ max|g|
    solver                  "grid" search, "golden" section, or the paper's "gradient-descent"
    evaluations             of d_c in a golden section
    lowest                  the smallest γ that is tried
    steps, step             of gradient descent: how many, and the first one's size in γ
    tie                     deviations this close count as equal and the larger clip wins; γ = 1 is tried too
    search_after_zero       search again next time when max|g| was 0
    search_when_saturated   search again at once when more than this share of |g| exceeds the held clip
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
        """Per tensor or per channel; gradient descent follows the slope of one clip."""
        return per in self.varies_along and (per == "tensor" or self.solver != "gradient-descent")

    def entries(self, scales: int) -> int:
        """The ratio, then the clips."""
        return 1 + scales

    def choose(self, x: Tensor, axis: int, memory: Memory) -> Choice:
        """The held clip, or a new one when the period is over."""
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
            # Nothing to search in. The literal paper would hold this 0 for a whole period.
            return Choice(peak) if self.search_after_zero else Choice(peak, remember=_remembered(1.0, peak), searched=True)
        before = memory.numbers(1)[0] if memory.initialized else None
        ratio = self._searched(Curve(x, peak, memory.stochastic), before)
        clip = peak * ratio
        return Choice(clip, remember=_remembered(ratio, clip), searched=True)

    def held(self, memory: Memory) -> Choice | None:
        """The held clip, or γ for clips per channel, until the period is over."""
        if self._is_due(memory):
            return None
        if memory.axis == -1 or self.hold == "clip":
            return Choice(memory.clip[1:])
        return Choice(ratio=memory.numbers(1)[0])

    def refit(self, held: Choice, peak: float, memory: Memory) -> Choice | None:
        """γ max|g| where a held clip is too far from it."""
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
        """The period of the paper."""
        return self.period

    def is_stale(self, choice: Choice, saturated: float, peak: float) -> bool:
        """Whether a held clip cuts off too much."""
        return not choice.searched and self.search_when_saturated is not None and saturated > self.search_when_saturated

    def _searched(self, curve: Curve, before: float | None) -> float:
        """γ with the smallest deviation; `before` is the last one."""
        if self.solver == "grid":
            return grid(curve, self.lowest, self.tie, before)
        if self.solver == "golden":
            return golden(curve, self.lowest, self.tie, self.evaluations)
        return descend(curve, self.lowest, self.tie, self.steps, self.step)


def _float32(number: float) -> float:
    """A product of two float32 numbers, which float64 holds exactly, as float32 arithmetic rounds it."""
    return float(np.float32(number))


def _remembered(ratio: float, clip: Tensor) -> Tensor:
    return torch.cat([clip.new_full((1,), ratio), clip.reshape(-1)])


@dataclass(frozen=True)
class DeviationCounteractive(LearningRateRule):
    """φ(d) = max(exp(-α d), β): the more a layer's gradient deviates, the smaller its steps (DCLRS)."""

    alpha: float = 20.0
    beta: float = 0.1

    def __post_init__(self) -> None:
        if self.alpha < 0.0 or not 0.0 < self.beta <= 1.0:
            raise ValueError(
                f"DeviationCounteractive: alpha is {self.alpha} and beta {self.beta}; alpha must not be negative and beta "
                "must lie in (0, 1]."
            )

    def factor(self, deviation: Any) -> Any:
        """φ of a number, or of a float64 tensor, with the same bits on every machine.

        >>> [round(DeviationCounteractive().factor(d), 4) for d in (0.0, 0.01, 0.05, 0.2)]
        [1.0, 0.8187, 0.3679, 0.1]
        """
        if isinstance(deviation, Tensor):
            return exponential_of(deviation * -self.alpha).clamp_min(self.beta)
        return max(exponential(-self.alpha * deviation), self.beta)


@dataclass(frozen=True, kw_only=True)
class UnifiedInt8(Recipe):
    """Gradients are clipped where their direction survives best; layers whose direction still bends learn slower."""

    slug: ClassVar[str] = "unified-int8"

    grad_output: TensorRule = field(default_factory=lambda: TensorRule(clip=DirectionSensitive(), rounding="stochastic"))
    learning_rate: LearningRateRule | None = field(default_factory=DeviationCounteractive)
