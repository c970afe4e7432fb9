# SPDX-License-Identifier: Apache-2.0
"""Quotients and square roots with defined bits: the float nearest to the exact value, on any device.

IEEE 754 requires this of every division and square root, and the instructions of the native library do it. PyTorch does not
always: if it was built with Intel's MKL, the float64 square root on a CPU is off by one unit in the last place for one number
in eighty. On a GPU it divides by a Python number by multiplying with the reciprocal, which rounds twice.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BIAS, _FRACTION_BITS = 1023, 52  # of a float64
_FRACTION = (1 << _FRACTION_BITS) - 1
_UNIT = 2.0**-_FRACTION_BITS  # in the last place of a number in [1, 2)
_SPLITTER = 2.0**27 + 1.0  # splits 53 bits into 26 and 26 and a sign
_SMALLEST_NORMAL = 2.0**-1022


def divided_by(x: Tensor, number: float) -> Tensor:
    """Returns x / number, rounded once.

    >>> divided_by(torch.tensor([5.0, 6.0]), 3)
    tensor([1.6667, 2.0000])
    """
    return x / x.new_full((), number)


def inverse(x: Tensor) -> Tensor:
    """Returns 1 / x, rounded once.

    >>> inverse(torch.tensor([2.0, 3.0]))
    tensor([0.5000, 0.3333])
    """
    return x.new_ones(()) / x


def square_root(x: Tensor) -> Tensor:
    """Returns the float64 nearest to the square root of each element of a float64 tensor.

    x = m · 4^h with m in [1, 4), so the root is the root of m, in [1, 2), times 2^h.

    >>> square_root(torch.tensor([2.0, 0.25, 0.0, -1.0], dtype=torch.float64))
    tensor([1.4142, 0.5000, 0.0000,    nan], dtype=torch.float64)
    """
    subnormal = x < _SMALLEST_NORMAL
    bits = torch.where(subnormal, x * 2.0**54, x).view(torch.int64)
    exponent = (bits >> _FRACTION_BITS) - _BIAS
    half = (exponent >> 1) - torch.where(subnormal, 27, 0)
    m = ((bits & _FRACTION) | ((_BIAS + (exponent & 1)) << _FRACTION_BITS)).view(torch.float64)
    root = _nearest_root(m, m.sqrt())
    scaled = (root.view(torch.int64) + (half << _FRACTION_BITS)).view(torch.float64)
    return torch.where((x > 0.0) & (x < math.inf), scaled, torch.where(x < 0.0, math.nan, x))


def _nearest_root(m: Tensor, guess: Tensor) -> Tensor:
    """Returns the float64 nearest to the root of each m in [1, 4), from a guess with a relative error of at most 2^-28.

    After one step of Heron's method, s has an error of 0.8 units in the last place u: 0.75 from its three roundings, the rest
    from the squared error of the guess. So the nearest number is s or a neighbour of s. It is s if (s - u/2)² < m < (s + u/2)²,
    which is -s·u < m - s² <= s·u: all three are multiples of 2^-104, and u²/4 is less than that.

    m - s² is exact where needed. s² = square + error without rounding (Dekker), and m - square is exact because the two are
    close. The rest needs more than 53 bits only from 2^-51 > s·u on, where its rounding does not change a comparison.
    """
    s = ((guess + m / guess) * 0.5).clamp(1.0, 2.0 - _UNIT)
    wide = s * _SPLITTER
    high = wide - (wide - s)
    low = s - high
    square = s * s
    error = ((high * high - square) + 2.0 * (high * low)) + low * low
    rest, reach = (m - square) - error, s * _UNIT
    return s + ((rest > reach).double() - (rest <= -reach).double()) * _UNIT
