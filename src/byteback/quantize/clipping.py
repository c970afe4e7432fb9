# SPDX-License-Identifier: Apache-2.0
"""Clip rules: how the bound of a tensor is chosen before it is rounded.

A rule is frozen data; one pure method is required, `choose`. It sees the tensor and what was remembered of earlier iterations,
and returns a `Choice`; writing the memory is the quantizer's work. The papers' own rules live in `byteback.recipes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from byteback import ops
from byteback.ops.magnitude import Average, Paired


@dataclass(frozen=True)
class Memory:
    """What a rule may look back at: one call slot of one quantizer.

    `clip` is what an earlier `Choice.remember` held (any finite value before the first): `ClipRule.entries` numbers, by default
    one per scale. `stochastic` says how the tensor will be rounded.
    """

    clip: Tensor
    initialized: bool
    updated_at: int
    iteration: int
    stochastic: bool = False


@dataclass(frozen=True)
class Choice:
    """A rule's answer: the clip to use now, shaped to broadcast over the tensor.

    `remember` goes into the memory (None leaves it alone), `searched` restarts the period, and `gaussian_share` is the
    part of the scales whose gradients looked Gaussian, for rules that ask.
    """

    clip: Tensor
    remember: Tensor | None = None
    searched: bool = False
    gaussian_share: float | None = None


class PairedGradient(Protocol):
    """A gradient of which int8 copies are made by one clip and by a clip per channel; it may not exist as floats."""

    def elements(self) -> int:
        """How many numbers it has."""
        ...

    def written(self) -> Tensor:
        """Its floats."""
        ...

    def pair(self, rule: Average, before: tuple[Tensor | None, Tensor | None], key: Tensor | None, want_one: bool) -> Paired:
        """Its copies under magnitude-aware clips (ops/magnitude.py); `before` are the clips of the last time."""
        ...


@dataclass(frozen=True)
class ClipRule:
    """Base of all clip rules.

    varies_along    the granularities that the rule can serve
    looks_back      whether it uses its memory; such a rule can serve gradients only, since a forward pass may be run again
                    by activation checkpointing and must then choose as before
    """

    varies_along: ClassVar[tuple[str, ...]] = ("tensor", "N", "C", "K")
    looks_back: ClassVar[bool] = False

    def choose(self, x: Tensor, axis: int, memory: Memory) -> Choice:
        """The clip for x, one for the whole tensor (axis -1) or one for each index of `axis`."""
        raise NotImplementedError(f"{type(self).__name__}.choose: a clip rule must say how it chooses its clip")

    def allows(self, per: str) -> bool:
        """Whether the rule can choose clips of this granularity."""
        return per in self.varies_along

    def entries(self, scales: int) -> int:
        """How many numbers the rule remembers of a tensor with so many scales."""
        return scales

    def averages(self) -> Average | None:
        """The numbers of a magnitude-aware rule, which chooses for two copies of a gradient at once; None for other rules."""
        return None

    def held(self, memory: Memory) -> Tensor | None:
        """The one clip of a rule that need not see the tensor this time; None where it must, or where clips vary."""
        return None

    def ratio(self, memory: Memory) -> float | None:
        """For a rule whose clips this time are a ratio times the maximum of each scale: that ratio; None for others."""
        return None

    def corrected(self, choice: Choice, peak: Tensor, memory: Memory) -> Choice | None:
        """Another choice instead of one made from memory, now that max|x| (0-dim) is known; None where the first one holds."""
        return None

    def search_period(self) -> int:
        """Iterations between two searches; 1 for a rule that chooses anew every time."""
        return 1

    def is_stale(self, choice: Choice, saturated: float, peak: float) -> bool:
        """Whether a clip chosen from memory proved wrong, given the saturated share and max|x| of this very tensor."""
        return False


@dataclass(frozen=True)
class MaxAbs(ClipRule):
    """clip = max|x|: nothing saturates. What the first paper uses for weights and activations."""

    def choose(self, x: Tensor, axis: int, memory: Memory) -> Choice:
        """max|x|.

        >>> import torch
        >>> nothing = Memory(torch.zeros(1), False, 0, 0)
        >>> MaxAbs().choose(torch.tensor([[1.0, -3.0]]), -1, nothing).clip.tolist()
        [[3.0]]
        """
        clip = ops.absmax(x, axis)
        return Choice(clip, remember=clip)
