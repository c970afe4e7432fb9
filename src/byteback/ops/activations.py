# SPDX-License-Identifier: Apache-2.0
"""The activations of a fused block in one table, which the checks, all backends and the layers use.

    activation   value                           derivative
    none         z                               1
    relu         max(z, 0)                       z > 0
    relu6        min(max(z, 0), 6)               0 < z < 6
    hardswish    (z · min(max(z+3, 0), 6)) / 6   0 below -3, z/3 + 0.5 up to 3, then 1
    silu         z / (1 + exp(-z))               s · (1 + z · (1 - s)), s = 1 / (1 + exp(-z))
    gelu         max(z, 0) - x · (e · m)         z < 0: u, else 1 - u; u = e · (m - x / sqrt(2π))

gelu is z·Φ(z), where x = min(|z|, 12), e = exp(-x²/2) and Φ(-x) = e · m(x), with m a polynomial of 1 / (1 + 0.28125 x). The
error of value and derivative is at most 2.5e-7 for |z| <= 10.

Every operation is float32 and rounds once, in the order written. NaN stays NaN. A new activation needs a row here, its number
and its gate in csrc/block/norm.h, vector code in csrc/block/vector, and a few lines in
ops/backends/triton/kernels/activations.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from byteback.ops.contract.exponential import exponential_float32
from byteback.ops.contract.rounded_once import divided_by, inverse


class Activation(NamedTuple):
    """One row of the table."""

    name: str
    number: int  # enum class Activation in csrc/block/norm.h
    gate: int  # enum class Gate there: how backward computes the derivative from z
    floor: bool  # the lower bound is 0
    ceiling: float  # upper bound
    is_monotone: bool  # does not decrease, so max|result| can be computed from the minimum and maximum of a channel
    is_smooth: bool  # the derivative is a number, not a bit: there is no mask, and backward computes z again
    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]  # of z; bool if the activation has a mask, else float32


MASK_GATE = 1
"""The gate of a derivative that comes from a mask (enum class Gate)."""


def _above_zero(z: Tensor) -> Tensor:
    """Returns max(z, 0). NaN stays NaN, -0 becomes +0."""
    return torch.where(z <= 0.0, 0.0, z)


def _below_six(z: Tensor) -> Tensor:
    return torch.where(z > 6.0, 6.0, z)


def _hardswish(z: Tensor) -> Tensor:
    return divided_by(z * _below_six(_above_zero(z + 3.0)), 6.0)


def _hardswish_slope(z: Tensor) -> Tensor:
    return torch.where(z < -3.0, 0.0, torch.where(z <= 3.0, divided_by(z, 3.0) + 0.5, 1.0))


def _silu(z: Tensor) -> Tensor:
    return z / (1.0 + exponential_float32(-z))


def _silu_slope(z: Tensor) -> Tensor:
    s = inverse(1.0 + exponential_float32(-z))
    return s * (1.0 + z * (1.0 - s))


_GELU_END, _GELU_STRETCH, _GELU_DENSITY = 12.0, 0.28125, 0.3989422804014327
_GELU_TAIL = (-0.1011379, 0.36526638, -0.199391, 0.24149361, 0.07827214, 0.115496784)  # csrc/block/norm.h says how it was found


def _normal_tail(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, e and m of gelu."""
    x = z.abs()
    x = torch.where(x > _GELU_END, _GELU_END, x)
    t = inverse(1.0 + _GELU_STRETCH * x)
    m = torch.full_like(t, _GELU_TAIL[0])
    for coefficient in _GELU_TAIL[1:]:
        m = m * t + coefficient
    return x, exponential_float32((x * x) * -0.5), m * t


def _gelu(z: Tensor) -> Tensor:
    x, e, m = _normal_tail(z)
    return _above_zero(z) - x * (e * m)


def _gelu_slope(z: Tensor) -> Tensor:
    x, e, m = _normal_tail(z)
    u = e * (m - _GELU_DENSITY * x)
    return torch.where(z < 0.0, u, 1.0 - u)


_ROWS = (
    Activation("none", 0, 0, False, math.inf, True, False, lambda z: z, lambda z: torch.ones_like(z, dtype=torch.bool)),
    Activation("relu", 1, 2, True, math.inf, True, False, _above_zero, lambda z: z > 0.0),
    Activation("relu6", 2, 3, True, 6.0, True, False, lambda z: _below_six(_above_zero(z)), lambda z: (z > 0.0) & (z < 6.0)),
    Activation("hardswish", 3, 4, True, math.inf, False, True, _hardswish, _hardswish_slope),
    Activation("silu", 4, 5, True, math.inf, False, True, _silu, _silu_slope),
    Activation("gelu", 5, 6, True, math.inf, False, True, _gelu, _gelu_slope),
)

TABLE: dict[str, Activation] = {row.name: row for row in _ROWS}
ACTIVATIONS = tuple(TABLE)
SMOOTH = tuple(row.name for row in _ROWS if row.is_smooth)
MONOTONE = tuple(row.name for row in _ROWS if row.is_monotone)
