# SPDX-License-Identifier: Apache-2.0
"""The numbers of the numeric contract, each written once.

Everything here follows from one decision: an int8 value lies in [-127, 127], and -128 never occurs.
Read `docs/1-scale-and-integer.md` for the derivations.
"""

from __future__ import annotations

NUMERICS_VERSION = 7
"""Raised whenever equal inputs would give other bits, also when the float table changes; stored with every model."""

QMAX = 127
"""The largest magnitude of an int8 value."""

TINY_CLIP = 2.0**-100
"""A clip below this counts as zero. 127 / clip would leave the range of float32 from 2^-121 on; the rest is margin."""

ZERO_SCALE = 1.0
"""The scale of a tensor whose clip counts as zero. Its integers are all 0, so any positive constant will do."""

MAX_INT32_DEPTH = (2**31 - 1) // (QMAX * QMAX)
"""The deepest sum of products that an int32 is guaranteed to hold: 133 144."""

MAX_FLOAT32_DEPTH = 2**24 // (QMAX * QMAX)
"""The deepest sum of products that is exact in float32, whatever its order: 1040."""

STATISTICS_BLOCK = 64
"""Rows that a float64 statistic adds one after the other before it adds whole blocks as a tree (see statistics.py)."""
