# SPDX-License-Identifier: Apache-2.0
"""Rounding to bfloat16 with defined bits, on any device: the nearest value, half to even; every NaN becomes the same one.

PyTorch rounds alike, but which NaN it makes depends on the instructions that it was built for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def to_bfloat16(x: Tensor) -> Tensor:
    """Returns x as bfloat16. Subnormal numbers are kept; a value beyond the largest bfloat16 becomes Inf.

    >>> to_bfloat16(torch.tensor([1.00390625, 1.01171875, 3.4e38])).tolist()
    [1.0, 1.015625, inf]
    """
    return x.to(torch.bfloat16).masked_fill_(x.isnan(), math.nan)
