# SPDX-License-Identifier: Apache-2.0
"""The activations of a fused block and their derivatives, by their numbers in ops/activations.py, with its bits.

ACT is the number of an activation; GATE says how a derivative is found: 2 relu, 3 relu6, 4 hardswish, 5 silu, 6 gelu.
"""

import triton
import triton.language as tl

from byteback.ops import activations as table
from byteback.ops.backends.triton.kernels.rounding import nearest
from byteback.ops.contract import exponential as exact

_LOWEST, _HIGHEST = tl.constexpr(exact._LOWEST_FLOAT32), tl.constexpr(exact._HIGHEST_FLOAT32)
_LOG2_E = tl.constexpr(exact._LOG2_E_FLOAT32)
_LN2_HIGH, _LN2_LOW = tl.constexpr(exact._LN2_HIGH_FLOAT32), tl.constexpr(exact._LN2_LOW_FLOAT32)
_C2, _C3, _C4, _C5 = (tl.constexpr(value) for value in (exact._C2, exact._C3, exact._C4, exact._C5))
_GELU_END, _GELU_STRETCH = tl.constexpr(table._GELU_END), tl.constexpr(table._GELU_STRETCH)
_GELU_DENSITY = tl.constexpr(table._GELU_DENSITY)
_T0, _T1, _T2, _T3, _T4, _T5 = (tl.constexpr(value) for value in table._GELU_TAIL)


@triton.jit
def exponential(t):
    """Returns e^t (contract/exponential.py: exponential_float32)."""
    zero = tl.zeros_like(t)
    t = tl.where(t < _LOWEST, zero + _LOWEST, tl.where(t > _HIGHEST, zero + _HIGHEST, t))
    n = nearest(t * _LOG2_E)
    r = (t - n * _LN2_HIGH) - n * _LN2_LOW
    square = r * r
    tail = (r * _C5 + _C4) * square + (r * _C3 + _C2)
    whole = tl.where(n != n, 0.0, n).to(tl.int32)
    return ((tail * square + r) + 1.0) * ((whole + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(x):
    return tl.div_rn(tl.zeros_like(x) + 1.0, x)


@triton.jit
def _normal_tail(z):
    """Returns x, e and m of gelu."""
    x = tl.abs(z)
    x = tl.where(x > _GELU_END, tl.zeros_like(x) + _GELU_END, x)
    t = _inverse(x * _GELU_STRETCH + 1.0)
    m = tl.zeros_like(t) + _T0
    m = m * t + _T1
    m = m * t + _T2
    m = m * t + _T3
    m = m * t + _T4
    m = m * t + _T5
    return x, exponential((x * x) * -0.5), m * t


@triton.jit
def activated(z, ACT: tl.constexpr):
    """Returns the activation of z. NaN stays NaN."""
    floored = tl.where(z <= 0.0, 0.0, z)
    if ACT == 1:
        z = floored
    if ACT == 2:
        z = tl.where(floored > 6.0, 6.0, floored)
    if ACT == 3:
        above = z + 3.0
        above = tl.where(above <= 0.0, 0.0, above)
        z = tl.div_rn(z * tl.where(above > 6.0, 6.0, above), tl.zeros_like(z) + 6.0)
    if ACT == 4:
        z = tl.div_rn(z, 1.0 + exponential(-z))
    if ACT == 5:
        x, e, m = _normal_tail(z)
        z = floored - x * (e * m)
    return z


@triton.jit
def gated(g, z, GATE: tl.constexpr):
    """Returns g times the derivative at z."""
    if GATE == 2:
        g = tl.where(z > 0.0, g, 0.0)
    if GATE == 3:
        g = tl.where((z > 0.0) & (z < 6.0), g, 0.0)
    if GATE == 4:
        inner = tl.div_rn(z, tl.zeros_like(z) + 3.0) + 0.5
        g = g * tl.where(z < -3.0, 0.0, tl.where(z <= 3.0, inner, 1.0))
    if GATE == 5:
        s = _inverse(1.0 + exponential(-z))
        g = g * (s * (1.0 + z * (1.0 - s)))
    if GATE == 6:
        x, e, m = _normal_tail(z)
        u = e * (m - x * _GELU_DENSITY)
        g = g * tl.where(z < 0.0, u, 1.0 - u)
    return g
