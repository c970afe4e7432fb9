# SPDX-License-Identifier: Apache-2.0
"""Clip rules that backends know by heart, each as the few numbers it takes.

A clip rule (`quantize/clipping.py`) says how it chooses a clip in methods of its own, and every backend can call those. Some
rules are worth more: one pass instead of three, or no look from the host. Such a rule names its program (`ClipRule.program`),
and a backend that knows the program runs it, with the same bits. A backend that does not know it calls the rule's methods.
"""

from __future__ import annotations

from typing import NamedTuple


class Maximum(NamedTuple):
    """clip = max|x|."""


class Held(NamedTuple):
    """A clip that is searched every `period` iterations and held in between (`recipes/unified.py`): a ratio and the clip itself
    are remembered. A single clip is kept while it is within a factor of `band` of ratio · max|g| (0: always). Clips per channel
    are ratio · max|g|. When more than a share of `saturated` exceeds a clip, it is searched again.
    """

    period: int
    band: float
    saturated: float


class Averaged(NamedTuple):
    """Magnitude-aware clips (`recipes/magnitude_aware.py`), of one copy of a gradient or of two at once.

    Gaussian where the share of |g| > σ exceeds `threshold`: clip = max|g|; else clip = before · keep + max|g| · add.
    """

    threshold: float
    keep: float
    add: float
