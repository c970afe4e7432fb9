# SPDX-License-Identifier: Apache-2.0
"""The learning rate as a function of the step alone, so that a resumed run needs no state for it."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "step", "linear", "constant")


def factor(schedule: str, step: int, steps: int, warmup: int = 0, every: int = 1, gamma: float = 0.1) -> float:
    """Returns the factor of the base learning rate at `step` of `steps`.

    warmup        steps of linear growth before the schedule, which then covers the remaining steps
    every, gamma  for "step": every `every` steps the rate is multiplied by gamma

    >>> [round(factor("cosine", step, 4), 3) for step in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    >>> [factor("linear", step, 6, warmup=2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    if schedule == "linear":
        return 1.0 - done
    if schedule == "step":
        return float(gamma ** (step // max(every, 1)))
    return 1.0
