# SPDX-License-Identifier: Apache-2.0
"""Unified INT8 (Zhu et al., CVPR 2020): Direction Sensitive Gradient Clipping and Deviation Counteractive LR Scaling.

    paper            here
    c                clip of grad_output
    g, ĝ             grad_output and its quantized self
    d_c              direction deviation, 1 - cos<g, ĝ>
    c* = argmin d_c  DirectionSensitive.choose
    φ(d_c), α, β     DeviationCounteractive: factor, alpha, beta
    update period    DirectionSensitive.period

Where we differ from the paper, and why:
* The paper learns c by gradient descent and leaves step size and number of steps open. We search γ = c / max|g| by golden
  section, which finds the same optimum in twelve evaluations; `solver="gradient-descent"` is there.
* Its period is 100, chosen for the cost of its solver. Ours is 10: a short run was better for it (docs/3-clipping.md).
* Three safeguards, each a field whose None is the literal paper: a clip of 0 is never held (zero-initialised residual
  branches make the first gradients vanish); a held clip that cuts off too much or has become far too wide is searched
  again at once; γ = 1 is tried too, and on a tie the larger clip wins (else tensors of equal |g| shrink for nothing).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from byteback import ops
from byteback.ops.exponential import exponential
from byteback.ops.limits import TINY_CLIP
from byteback.quantize import Choice, ClipRule, Memory, TensorRule, deviation_of
from byteback.recipes.recipe import LearningRateRule, Recipe

_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True)
class DirectionSensitive(ClipRule):
    """c = argmin 1 - cos<g, ĝ(c)>, searched every `period` iterations (DSGC).

    period                  iterations between two searches (the paper: 100)
    hold                    between searches keep the "clip" c, or the "ratio" c / max|g|
    solver                  "golden" section, or the paper's "gradient-descent"
    evaluations             of d_c in a golden section
    lowest                  the smallest γ = c / max|g| that is tried
    steps, step             of gradient descent: how many, and the first one's size in γ
    tie                     deviations this close count as equal and the larger clip wins; γ = 1 is tried too
    search_after_zero       search again next time when max|g| was 0
    search_when_saturated   search again at once when more than this share of |g| exceeds the held clip
    search_when_grown       search again at once when max|g| is this many times larger than the held clip
    search_when_shrunk      search again at once when max|g| is this many times smaller than the held clip
    """

    varies_along: ClassVar[tuple[str, ...]] = ("tensor",)
    looks_back: ClassVar[bool] = True

    period: int = 10
    hold: str = "clip"
    solver: str = "golden"
    evaluations: int = 12
    lowest: float = 0.05
    steps: int = 16
    step: float = 0.1
    tie: float | None = 1e-6
    search_after_zero: bool | None = True
    search_when_saturated: float | None = 0.01
    search_when_grown: float | None = 3.0
    search_when_shrunk: float | None = 8.0

    def __post_init__(self) -> None:
        if self.hold not in ("clip", "ratio") or self.solver not in ("golden", "gradient-descent"):
            raise ValueError(
                f"DirectionSensitive: hold is {self.hold!r} and solver {self.solver!r}; hold is 'clip' or 'ratio', solver "
                "is 'golden' or 'gradient-descent'."
            )
        if self.period < 1 or self.evaluations < 2 or self.steps < 1 or not 0.0 < self.lowest < 1.0:
            raise ValueError(
                f"DirectionSensitive: period {self.period}, evaluations {self.evaluations}, steps {self.steps}, lowest "
                f"{self.lowest}; the first three must be at least 1, 2 and 1, and lowest must lie between 0 and 1."
            )

    def choose(self, x: Tensor, axis: int, memory: Memory) -> Choice:
        """The held clip, or a new one when the period is over."""
        due = self._is_due(memory)
        shape = (1,) * x.dim()
        if not due and self.hold == "clip":
            return Choice(memory.clip.reshape(shape).clone())
        peak = ops.absmax(x)
        if not due:
            return Choice(peak * memory.clip.reshape(shape))
        if not math.isfinite(float(peak)):
            return Choice(peak)
        if float(peak) < TINY_CLIP:
            # Nothing to search in. The literal paper would hold this 0 for a whole period.
            return Choice(peak) if self.search_after_zero else Choice(peak, remember=peak, searched=True)
        ratio = self._golden(x, peak) if self.solver == "golden" else self._descend(x, peak)
        clip = peak * ratio
        return Choice(clip, remember=clip if self.hold == "clip" else torch.full_like(clip, ratio), searched=True)

    def held(self, memory: Memory) -> Tensor | None:
        """The held clip, until the period is over."""
        return None if self._is_due(memory) or self.hold != "clip" else memory.clip

    def _is_due(self, memory: Memory) -> bool:
        return not memory.initialized or memory.iteration - memory.updated_at >= self.period

    def search_period(self) -> int:
        """The period of the paper."""
        return self.period

    def is_stale(self, choice: Choice, saturated: float, peak: float) -> bool:
        """Whether a held clip no longer fits."""
        if choice.searched:
            return False
        clip = float(choice.clip)
        shrunk = self.search_when_shrunk is not None and 0.0 < peak * self.search_when_shrunk < clip
        # A detector's gradient is zero nearly everywhere: what matters may be cut off without a share that shows. (A held ratio
        # follows max|g| by itself.)
        grown = self.search_when_grown is not None and self.hold == "clip" and 0.0 < clip * self.search_when_grown < peak
        return shrunk or grown or (self.search_when_saturated is not None and saturated > self.search_when_saturated)

    def _deviations(self, x: Tensor, peak: Tensor, ratios: list[float]) -> list[float]:
        clips = peak.reshape(1) * torch.tensor(ratios, dtype=torch.float32, device=x.device)
        return [deviation_of(*terms) for terms in ops.cosine_terms(x, clips).tolist()]

    def _golden(self, x: Tensor, peak: Tensor) -> float:
        """Golden-section search for γ in [lowest, 1]."""
        low, high = self.lowest, 1.0
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        ratios = [left, right] + ([1.0] if self.tie is not None else [])
        tried = dict(zip(ratios, self._deviations(x, peak, ratios), strict=True))
        for _ in range(self.evaluations - 2):
            if tried[left] <= tried[right]:
                high, right = right, left
                left = probe = high - _GOLDEN * (high - low)
            else:
                low, left = left, right
                right = probe = low + _GOLDEN * (high - low)
            tried[probe] = self._deviations(x, peak, [probe])[0]
        return self._best(tried)

    def _descend(self, x: Tensor, peak: Tensor) -> float:
        """Gradient descent on γ with the sign of ∂d_c/∂c; the step halves each time the sign turns."""
        ratio, step, before, last = 1.0, self.step, 0.0, 1.0
        tried: dict[float, float] = {}
        for _ in range(self.steps):
            xq, qq, xx, xd, qd = ops.cosine_slope_terms(x, (peak * ratio).reshape(())).tolist()
            tried[ratio] = 1.0 - xq / math.sqrt(xx * qq) if xx * qq > 0.0 else 1.0
            slope = -(xd * qq - xq * qd)  # ∂d_c/∂c times a positive number (spec A5)
            sign = math.copysign(1.0, slope) if slope else 0.0
            step = step / 2.0 if sign * before < 0.0 else step
            last, ratio = ratio, min(1.0, max(self.lowest, ratio - step * sign))
            before = sign
            if ratio == last:
                break
        return self._best(tried) if self.tie is not None else last

    def _best(self, tried: dict[float, float]) -> float:
        least = min(tried.values())
        return max(ratio for ratio, deviation in tried.items() if deviation <= least + (self.tie or 0.0))


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

    def factor(self, deviation: float) -> float:
        """φ, with the same bits on every machine.

        >>> [round(DeviationCounteractive().factor(d), 4) for d in (0.0, 0.01, 0.05, 0.2)]
        [1.0, 0.8187, 0.3679, 0.1]
        """
        return max(exponential(-self.alpha * deviation), self.beta)


@dataclass(frozen=True, kw_only=True)
class UnifiedInt8(Recipe):
    """Gradients are clipped where their direction survives best; layers whose direction still bends learn slower."""

    slug: ClassVar[str] = "unified-int8"

    grad_output: TensorRule = field(default_factory=lambda: TensorRule(clip=DirectionSensitive(), rounding="stochastic"))
    learning_rate: LearningRateRule | None = field(default_factory=DeviationCounteractive)
