# SPDX-License-Identifier: Apache-2.0
"""The learning rate of every step, as a function of the step alone: nothing to store, nothing to resume."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "step", "linear", "constant")


def factor(schedule: str, step: int, steps: int, warmup: int = 0, every: int = 1, gamma: float = 0.1) -> float:
    """What the base learning rate is multiplied with at `step` of `steps`.

    warmup        steps of linear growth before the schedule, which then runs over the rest
    every, gamma  of "step": after each `every` steps the rate is multiplied with gamma

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
