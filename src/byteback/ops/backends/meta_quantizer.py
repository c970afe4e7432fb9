# SPDX-License-Identifier: Apache-2.0
"""The step of a quantizer on the meta device: shapes only, no value is read.

A training step that runs here does not synchronize on a GPU either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from byteback.ops.quantizer import DEVIATION, Gradient, floats_of, shapes
from byteback.ops.types import QTensor


class MetaSteps:
    """The operations of ops/quantizer.py."""

    defers = False  # there are no values to flag or to read

    def step(self, x: Gradient, state: Any, settings: Any, *_: Any) -> QTensor:
        return shapes(floats_of(x), settings.axis())

    def step_pair(
        self, x: Gradient, states: Any, settings: tuple[Any, Any], key: Tensor | None, moment: Any, want_first: bool
    ) -> tuple[QTensor | None, QTensor]:
        first, second = (shapes(floats_of(x), each.axis()) for each in settings)
        return (first if want_first else None), second

    def adopt(self, q: QTensor, *_: Any) -> QTensor:
        return q

    def predict(
        self, x: Tensor, tracked: Tensor, seen: Tensor, iteration: Tensor, settings: Any, slot: int, per_sample: bool, _: bool
    ) -> QTensor:
        return shapes(x, 0 if per_sample else settings.axis())

    def tracked_clip(self, tracked: Tensor, seen: Tensor, slot: int, ordinal_known: bool) -> Tensor | None:
        return tracked[slot].clone() if tracked.shape[1] == 1 else None

    def fresh(self, x: Tensor, iteration: Tensor, settings: Any, flags: Tensor | None = None) -> QTensor:
        return shapes(x, settings.axis())

    def same_clip(self, clip: Tensor, other: Tensor) -> bool:
        return False

    def block_prediction(self, *_: Any) -> None:
        return None

    def block_site(self, *_: Any) -> None:
        return None

    def factors(self, observed: Sequence[Sequence[Tensor]], rules: Sequence[Any]) -> list[Tensor]:
        return [
            rule.factor(torch.stack([copy[:, DEVIATION].amax() for copy in copies]).amax().double())
            for copies, rule in zip(observed, rules, strict=True)
        ]


STEPS = MetaSteps()
