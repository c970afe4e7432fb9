# SPDX-License-Identifier: Apache-2.0
"""Programs: clip rules that backends implement themselves, described by a few numbers.

A clip rule (`quantize/clipping.py`) chooses a clip in its methods, and every backend can call them. For some rules a backend
can do better: one pass instead of three, or no synchronization with the host. Such a rule returns a program
(`ClipRule.program`). A backend that implements the program runs it, with the same bits. Other backends call the methods.
"""

from __future__ import annotations

from typing import NamedTuple


class Maximum(NamedTuple):
    """clip = max|x|."""


class Held(NamedTuple):
    """A clip that is searched every `period` iterations and held in between (`recipes/unified.py`). Its memory is a ratio and
    the clip itself. A single clip is held while it is within a factor of `band` of ratio · max|g| (0: always). Clips per
    channel are ratio · max|g|. If a larger share than `saturated` exceeds a clip, it is searched again.
    """

    period: int
    band: float
    saturated: float


class Averaged(NamedTuple):
    """Magnitude-aware clips (`recipes/magnitude_aware.py`), of one copy of a gradient or of two at once.

    If the share of |g| > σ exceeds `threshold` (Gaussian), clip = max|g|. Otherwise clip = before · keep + max|g| · add.
    """

    threshold: float
    keep: float
    add: float
