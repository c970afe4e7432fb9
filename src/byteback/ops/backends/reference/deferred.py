# SPDX-License-Identifier: Apache-2.0
"""The steps of the reference for a device on which reading a value synchronizes. They flag NaN and Inf (ops/refusals.py).

A tensor with NaN or Inf is replaced by zeros before a clip rule reads it, and the state is restored afterwards, both without
synchronization. Finite tensors give the bits of the reference. The clip rules themselves still read values, as in the
reference. A backend that has kernels for them can inherit the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from byteback.ops.backends.reference.quantizer import Steps
from byteback.ops.quantizer import Gradient, Moment, State, floats_of
from byteback.ops.refusals import Unless, counted, filled, flag, judged
from byteback.ops.types import QTensor


class DeferredSteps(Steps):
    """The operations of ops/quantizer.py, none of which raises NonFiniteError."""

    defers = True

    def step(self, x: Gradient, state: State, settings: Any, key: Tensor | None, moment: Moment) -> QTensor:
        floats = floats_of(x)
        nonfinite, unless = counted(floats), Unless(state, moment.slot)
        q = super().step(_without(floats, nonfinite), state, settings, key, moment)
        unless.put_back(nonfinite > 0)
        return judged(q, nonfinite, moment.iteration, state, settings, moment.remember)

    def step_pair(
        self,
        x: Gradient,
        states: tuple[State, State],
        settings: tuple[Any, Any],
        key: Tensor | None,
        moment: Moment,
        want_first: bool,
    ) -> tuple[QTensor | None, QTensor] | None:
        floats = floats_of(x)
        nonfinite, unless = counted(floats), [Unless(state, moment.slot) for state in states]
        made = super().step_pair(_without(floats, nonfinite), states, settings, key, moment, want_first)
        if made is None:
            return None
        results: list[QTensor | None] = []
        for index, copy in enumerate(made):
            if copy is not None:
                unless[index].put_back(nonfinite > 0)
                copy = judged(copy, nonfinite, moment.iteration, states[index], settings[index], moment.remember)
            results.append(copy)
        return results[0], results[1]  # type: ignore[return-value]

    def adopt(
        self,
        q: QTensor,
        clip: Tensor,
        x: Callable[[], Tensor],
        state: State,
        settings: Any,
        moment: Moment,
    ) -> QTensor:
        assert q.counts is not None
        nonfinite, unless = q.counts[1], Unless(state, moment.slot)
        bad = nonfinite > 0
        finite = filled(q, nonfinite, "skip")._replace(counts=q.counts.masked_fill(bad, 0))
        clip = clip.masked_fill(bad, 0.0)
        q = super().adopt(finite, clip, lambda: _without(x(), nonfinite), state, settings, moment)
        unless.put_back(bad)
        return judged(q, nonfinite, moment.iteration, state, settings, moment.remember)

    def predict(self, x: Tensor, *rest: Any) -> QTensor:
        nonfinite = counted(x)
        return filled(super().predict(_without(x, nonfinite), *rest), nonfinite, "propagate")

    def fresh(self, x: Tensor, iteration: Tensor, settings: Any, flags: Tensor | None = None) -> QTensor:
        nonfinite = counted(x)
        q = super().fresh(_without(x, nonfinite), iteration, settings)
        if flags is None or settings.on_nonfinite == "propagate":
            return filled(q, nonfinite, "propagate")
        flag(flags, nonfinite, iteration)  # skipping steps would not make a weight finite again
        return filled(q, nonfinite, "raise")


def _without(x: Tensor, nonfinite: Tensor) -> Tensor:
    """Returns x, or zeros if any of its values is NaN or Inf."""
    return torch.where(nonfinite > 0, 0.0, x)


STEPS = DeferredSteps()
