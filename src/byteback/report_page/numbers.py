# SPDX-License-Identifier: Apache-2.0
"""Numbers small enough to travel in a page, and few enough."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def short(value: float | None, digits: int = 4) -> float | None:
    """Four digits: more than any eye sees in a chart.

    >>> short(0.0001234567)
    0.0001235
    """
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def mean(values: Sequence[float | None]) -> float | None:
    """Of the numbers that exist; None where there is none."""
    known = [value for value in values if value is not None]
    return short(statistics.fmean(known)) if known else None


def spaced(values: Sequence[int], most: int) -> list[int]:
    """At most `most` of the values, evenly spaced, the first and the last among them.

    >>> spaced(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
