# SPDX-License-Identifier: Apache-2.0
"""Clip rules: how the clip of a tensor is chosen before it is rounded.

A rule is frozen data with one method per decision. Only `choose` is required: it gets the tensor and the memory of earlier
iterations, and returns a `Choice`. The quantizer's step writes the memory (ops/quantizer.py). A rule does not read numbers
from tensors with `item`, `tolist` or `float`. It computes with tensors, or calls `Memory.numbers` or `ops.quantizer.look`.
The rules of the papers are in `byteback.recipes`.
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
    """Base class of all clip rules.

    varies_along    the granularities that the rule supports
    looks_back      whether the rule uses its memory. Only rules for gradients may: activation checkpointing runs a forward pass
                    again, which must choose the same clip
    diagnostics     names of the other numbers that the rule returns for a tensor (`Choice.diagnostics`); they appear in
                    `health`, in the journal of a run and on its report page
    """

    varies_along: ClassVar[tuple[str, ...]] = ("tensor", "N", "C", "K")
    looks_back: ClassVar[bool] = False
    diagnostics: ClassVar[tuple[str, ...]] = ()

    def choose(self, x: Tensor, axis: int, memory: Memory) -> Choice:
        """Returns the clip for x: one for the whole tensor (axis -1), or one for each index of `axis`."""
        raise NotImplementedError(f"{type(self).__name__}.choose: a clip rule must implement choose(x, axis, memory)")

    def allows(self, per: str) -> bool:
        """Whether the rule supports this granularity."""
        return per in self.varies_along

    def entries(self, scales: int) -> int:
        """Returns how many numbers the rule remembers for a tensor with this number of scales."""
        return scales

    def held(self, memory: Memory) -> Choice | None:
        """Returns the result of `choose` if it does not depend on the tensor this time; None if it does."""
        return None

    def refit(self, held: Choice, peak: float, memory: Memory) -> Choice | None:
        """Returns a new choice to replace a held one, now that max|x| is known; None to keep it."""
        return None

    def is_stale(self, choice: Choice, saturated: float, peak: float) -> bool:
        """Whether a held clip does not fit this tensor, given its saturated share and max|x|. Then `choose` is called."""
        return False

    def search_period(self) -> int:
        """Returns the number of iterations between two searches; 1 for a rule that chooses a clip in every iteration."""
        return 1

    def program(self) -> Any:
        """Returns the rule in a form that backends implement themselves (ops/programs.py); None if there is no such form."""
        return None


@dataclass(frozen=True)
class MaxAbs(ClipRule):
    """clip = max|x|, so nothing saturates. The first paper uses it for weights and activations."""

    def choose(self, x: Tensor, axis: int, memory: Memory) -> Choice:
        """Returns max|x|.

        >>> import torch
        >>> nothing = Memory(torch.zeros(1), False, 0, 0)
        >>> MaxAbs().choose(torch.tensor([[1.0, -3.0]]), -1, nothing).clip.tolist()
        [[3.0]]
        """
        clip = ops.absmax(x, axis)
        return Choice(clip, remember=clip)

    def program(self) -> Maximum:
        """Returns a program: a backend computes clip and integers in one call."""
        return Maximum()
