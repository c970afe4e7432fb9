# SPDX-License-Identifier: Apache-2.0
"""Clip rules: how the bound of a tensor is chosen before it is rounded.

A rule is frozen data with one method for each thing that it decides. Only `choose` is required: it sees the tensor and what
was remembered of earlier iterations, and returns a `Choice`. Writing the memory is the work of the quantizer's step
(ops/quantizer.py). A rule does not look at tensors' numbers itself (`item`, `tolist`, `float`): it computes with tensors, or
asks `Memory.numbers` and `ops.quantizer.look`. The papers' own rules are in `byteback.recipes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from byteback import ops
from byteback.ops.programs import Maximum
from byteback.ops.quantizer import Choice, Memory

__all__ = ["Choice", "ClipRule", "MaxAbs", "Memory"]


@dataclass(frozen=True)
class ClipRule:
    """Base of all clip rules.

    varies_along    the granularities for which the rule can choose clips
    looks_back      whether it uses its memory. Only rules for gradients may: activation checkpointing runs a forward pass
                    again, and it must then choose as before
    diagnostics     names of what the rule has to say of a tensor besides its clip (`Choice.diagnostics`); they appear in
                    `health`, in a run's journal and on its page
    """

    varies_along: ClassVar[tuple[str, ...]] = ("tensor", "N", "C", "K")
    looks_back: ClassVar[bool] = False
    diagnostics: ClassVar[tuple[str, ...]] = ()

    def choose(self, x: Tensor, axis: int, memory: Memory) -> Choice:
        """The clip for x, one for the whole tensor (axis -1) or one for each index of `axis`."""
        raise NotImplementedError(f"{type(self).__name__}.choose: a clip rule must say how it chooses its clip")

    def allows(self, per: str) -> bool:
        """Whether the rule can choose clips of this granularity."""
        return per in self.varies_along

    def entries(self, scales: int) -> int:
        """How many numbers the rule remembers of a tensor with so many scales."""
        return scales

    def held(self, memory: Memory) -> Choice | None:
        """What `choose` would return, where that takes no look at the tensor; None where it does."""
        return None

    def refit(self, held: Choice, peak: float, memory: Memory) -> Choice | None:
        """Another choice in place of a held one, now that max|x| is known; None to keep it."""
        return None

    def is_stale(self, choice: Choice, saturated: float, peak: float) -> bool:
        """Whether a held clip proved wrong, given the saturated share and max|x| of this tensor; then `choose` is asked."""
        return False

    def search_period(self) -> int:
        """Iterations between two searches; 1 for a rule that chooses anew every time."""
        return 1

    def program(self) -> Any:
        """The rule as a backend may know it by heart (ops/programs.py); None where it is no such rule."""
        return None


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

    def program(self) -> Maximum:
        """Clip and integers can be found in one call."""
        return Maximum()
