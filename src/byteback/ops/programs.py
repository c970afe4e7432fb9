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


class Averaged(NamedTuple):
    """Magnitude-aware clips (`recipes/magnitude_aware.py`), of one copy of a gradient or of two at once.

    Gaussian where the share of |g| > σ exceeds `threshold`: clip = max|g|; else clip = before · keep + max|g| · add.
    """

    threshold: float
    keep: float
    add: float
