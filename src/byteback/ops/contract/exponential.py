# SPDX-License-Identifier: Apache-2.0
"""e^t as a fixed sequence of correctly rounded operations, so that it has the same bits on every machine.

The result of exp differs between C libraries, processors and GPUs. Here e^t = 2^n · e^r with n = round(t / ln 2), so
|r| <= ln 2 / 2 = 0.35. It is computed by additions, subtractions and multiplications; 2^n only changes the exponent. The error
is below one unit in the last place. The learning-rate factor of `recipes/unified.py` uses it. SiLU and GELU of the fused block
use the shorter `exponential_float32`.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

LOWEST, HIGHEST = -708.0, 709.0
"""Below the first number e^t is 0, above the second it is infinite; between them every result is a normal float64."""

_ROUNDER = 1.5 * 2.0**52  # adding it to a number and subtracting it again rounds the number to an integer
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # has 32 bits, so n times it is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_TAYLOR = tuple(1.0 / math.factorial(k) for k in range(13, 1, -1))  # the remainder is below 0.35^14 / 14! = 2^-58

# In float32: n = round(t · log2 e), r = (t - n · LN2_HIGH) - n · LN2_LOW (n · LN2_HIGH is exact),
# e^r = ((c5 r + c4) r² + (c3 r + c2)) r² + r + 1, the minimax polynomial for |r| <= ln2 / 2.
_LOWEST_FLOAT32, _HIGHEST_FLOAT32 = -87.0, 89.0  # below, 1 + exp(t) is 1; above, n is 128, whose 2^n has the bits of infinity
_LOG2_E_FLOAT32 = 1.44269504088896341
_LN2_HIGH_FLOAT32, _LN2_LOW_FLOAT32 = 0.693359375, -2.12194440054690583e-4
_C2, _C3, _C4, _C5 = 0.499992311000824, 0.16667115688323975, 0.04189033433794975, 0.008312501944601536

Number = TypeVar("Number", float, Tensor)


def _parts(t: Number) -> tuple[Number, Number]:
    """Returns (e^r, n) for t from LOWEST to HIGHEST.

    The error in units in the last place of a result in [0.5, 1), where it is largest: 0.5 from the last addition, 0.25 from the
    one before, 0.19 from the three roundings of r²·tail, which is below 0.054, and from the sum with `lost`.
    """
    n = (t * _LOG2_E + _ROUNDER) - _ROUNDER
    high, low = t - n * _LN2_HIGH, n * _LN2_LOW
    r = high - low
    lost = (high - r) - low  # the rounding error of the line above
    tail = r * _TAYLOR[0] + _TAYLOR[1]
    for coefficient in _TAYLOR[2:]:
        tail = tail * r + coefficient
    return ((r * r * tail + lost) + r) + 1.0, n


def exponential(t: float) -> float:
    """Returns e^t of a Python number.

    >>> exponential(0.0), exponential(-1.0), exponential(-1e9), exponential(1e9)
    (1.0, 0.36787944117144233, 0.0, inf)
    """
    if not LOWEST <= t <= HIGHEST:
        return 0.0 if t < LOWEST else math.inf if t > HIGHEST else t
    fraction, n = _parts(t)
    return math.ldexp(fraction, int(n))


def exponential_of(t: Tensor) -> Tensor:
    """Returns e^t of each element of a float64 tensor, on any device, with the bits of `exponential`.

    >>> exponential_of(torch.tensor([0.0, -1.0], dtype=torch.float64)).tolist()
    [1.0, 0.36787944117144233]
    """
    fraction, n = _parts(t.clamp(LOWEST, HIGHEST))
    bits = fraction.view(torch.int64) + (torch.where(t.isnan(), 0.0, n).to(torch.int64) << 52)
    inside = torch.where(t.isnan(), t, bits.view(torch.float64))
    return torch.where(t < LOWEST, 0.0, torch.where(t > HIGHEST, math.inf, inside))


def exponential_float32(t: Tensor) -> Tensor:
    """Returns e^t of each element of a float32 tensor. The relative error is below 2e-7; infinite from 88.4 on.

    >>> exponential_float32(torch.tensor([0.0, -1000.0, 1000.0])).tolist()
    [1.0, 1.64581...e-38, inf]
    """
    lowest, highest = _LOWEST_FLOAT32, _HIGHEST_FLOAT32
    t = torch.where(t < lowest, lowest, torch.where(t > highest, highest, t))
    n = torch.round(t * _LOG2_E_FLOAT32)
    r = (t - n * _LN2_HIGH_FLOAT32) - n * _LN2_LOW_FLOAT32
    square = r * r
    tail = (_C5 * r + _C4) * square + (_C3 * r + _C2)
    whole = torch.where(torch.isnan(n), 0.0, n).to(torch.int32)
    return ((tail * square + r) + 1.0) * ((whole + 127) << 23).view(torch.float32)
