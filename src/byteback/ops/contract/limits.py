# SPDX-License-Identifier: Apache-2.0
"""The constants of the numeric contract.

All of them follow from one decision: an int8 value is in [-127, 127], and -128 is not used. `docs/1-scale-and-integer.md` has
the derivations.
"""

from __future__ import annotations

NUMERICS_VERSION = 8
"""Increased whenever equal inputs give other bits, also when the float table changes. Stored with every model."""

QMAX = 127
"""The largest magnitude of an int8 value."""

TINY_CLIP = 2.0**-100
"""A clip below this is treated as zero. 127 / clip would overflow float32 from 2^-121 on; the rest is margin."""

ZERO_SCALE = 1.0
"""The scale of a tensor whose clip is treated as zero. Its integers are all 0, so any positive constant works."""

MAX_INT32_DEPTH = (2**31 - 1) // (QMAX * QMAX)
"""The largest number of products whose sum always fits in int32: 133 144."""

MAX_FLOAT32_DEPTH = 2**24 // (QMAX * QMAX)
"""The largest number of products whose sum is exact in float32 in any order: 1040."""

STATISTICS_BLOCK = 64
"""Rows per block of a float64 sum: the rows of a block are added in order, then the blocks as a tree (see statistics.py)."""
