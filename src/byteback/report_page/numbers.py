# SPDX-License-Identifier: Apache-2.0
"""Shortens numbers and lists of numbers for the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def short(value: float | None, digits: int = 4) -> float | None:
    """Rounds to four digits, which is enough for a chart; None for NaN and Inf.

    >>> short(0.0001234567)
    0.0001235
    """
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean of the numbers that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return short(statistics.fmean(known)) if known else None


def spaced(values: Sequence[int], most: int) -> list[int]:
    """Returns at most `most` of the values, evenly spaced, including the first and the last.

    >>> spaced(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
