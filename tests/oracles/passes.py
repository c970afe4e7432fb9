# SPDX-License-Identifier: Apache-2.0
"""The fused block's passes in numpy float32: z = a·x + b (+ residual), an activation, int8; and the way back.

Legend: x, g are (N, C, ...); a, b, p, q, r are (C,). Every operation rounds once, in the order written. A residual is an array,
(values int8, scale) or None; x as it was kept is float32 or (values int8, step, centre), bfloat16 having become float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oracles import quantize as quantizer
from oracles import statistics
from oracles.norms import norm_step
from oracles.statistics import column

f32 = np.float32
SMOOTH = ("hardswish", "silu", "gelu")


def exponential(t: np.ndarray) -> np.ndarray:
    """exp(t) = 2^n · e^r by the contract's constants, n = round(t · log2 e)."""
    t = np.where(t < f32(-87), f32(-87), np.where(t > f32(89), f32(89), t)).astype(f32)
    n = np.rint(t * f32(1.44269504088896341))
    r = (t - n * f32(0.693359375)) - n * f32(-2.12194440054690583e-4)
    square = r * r
    tail = (f32(0.008312501944601536) * r + f32(0.04189033433794975)) * square
    tail = tail + (f32(0.16667115688323975) * r + f32(0.499992311000824))
    power = np.where(np.isnan(n), f32(0), n).astype(np.int32)
    return ((tail * square + r) + f32(1)) * ((power + np.int32(127)) << np.int32(23)).view(f32)


def _between(z: np.ndarray, ceiling: float) -> np.ndarray:
    """min(max(z, 0), ceiling); a NaN stays one, a zero is +0."""
    z = np.where(z <= 0, f32(0), z)
    return np.where(z > ceiling, f32(ceiling), z).astype(f32)


def activate(z: np.ndarray, activation: str) -> np.ndarray:
    if activation == "relu":
        return _between(z, np.inf)
    if activation == "relu6":
        return _between(z, 6.0)
    if activation == "hardswish":
        return (z * _between(z + f32(3), 6.0)) / f32(6)
    if activation == "gelu":
        x, e, m = normal_tail(z)
        return _between(z, np.inf) - x * (e * m)
    return z / (f32(1) + exponential(-z)) if activation == "silu" else z


def normal_tail(z: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x = min(|z|, 12), e = exp(-x²/2) and m, where e · m is the normal distribution's tail from x on."""
    x = _between(np.abs(z), 12.0)
    t = f32(1) / (f32(1) + f32(0.28125) * x)
    m = f32(-0.1011379) * t + f32(0.36526638)
    for coefficient in (-0.199391, 0.24149361, 0.07827214, 0.115496784):
        m = m * t + f32(coefficient)
    return x, exponential((x * x) * f32(-0.5)), m * t


def passes(z: np.ndarray, activation: str) -> np.ndarray:
    """Where none, relu and relu6 let the gradient through."""
    if activation == "none":
        return np.ones(z.shape, bool)
    return (z > 0) & (z < 6) if activation == "relu6" else z > 0


def slope(z: np.ndarray, activation: str) -> np.ndarray:
    """The derivative of a smooth activation."""
    if activation == "hardswish":
        return np.where(z < -3, f32(0), np.where(z <= 3, z / f32(3) + f32(0.5), f32(1))).astype(f32)
    if activation == "gelu":
        x, e, m = normal_tail(z)
        u = e * (m - f32(0.3989422804014327) * x)
        return np.where(z < 0, u, f32(1) - u).astype(f32)
    s = f32(1) / (f32(1) + exponential(-z))
    return s * (f32(1) + z * (f32(1) - s))


def pack_mask(bits: np.ndarray) -> np.ndarray:
    """uint8 (pixels, ceil(C / 8)): bit c % 8 of byte c // 8."""
    return np.packbits(statistics.rows_of(bits), axis=1, bitorder="little")


def unpack_mask(mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    n, c, *spatial = shape
    bits = np.unpackbits(np.ascontiguousarray(mask), axis=1, count=c, bitorder="little").astype(bool)
    return np.moveaxis(bits.reshape(n, *spatial, c), -1, 1)


def linear(x: np.ndarray, a: np.ndarray, b: np.ndarray, residual: Any) -> np.ndarray:
    z = column(a, x.ndim) * x + column(b, x.ndim)
    if isinstance(residual, tuple):
        return z + residual[0].astype(f32) * f32(residual[1].reshape(()))
    return z if residual is None else z + residual


def normalize(
    x: np.ndarray, a: np.ndarray, b: np.ndarray, residual: Any, activation: str, clip: np.ndarray | None
) -> dict[str, np.ndarray | None]:
    """values, scale, output, mask, counts and peak; without a clip the first, second and fifth are None."""
    z = linear(x, a, b, residual)
    y = activate(z, activation)
    made: dict[str, np.ndarray | None] = {"values": None, "scale": None, "counts": None}
    if clip is not None:
        made["values"], made["scale"], made["counts"], _ = quantizer.quantize(y, clip.reshape((1,) * x.ndim), None)
    mask = None if activation in SMOOTH else pack_mask(passes(z, activation))
    return {**made, "output": y, "mask": mask, "peak": np.asarray(quantizer.absmax(y).reshape(()))}


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """x rounded to eight bits of mantissa, half to even, as float32."""
    bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) & np.uint64(0xFFFF0000)).astype(np.uint32)
    return np.where(np.isnan(x), f32(np.nan), rounded.view(f32).reshape(x.shape)).astype(f32)


def pack_norm(x: np.ndarray, low: np.ndarray, high: np.ndarray, mean: np.ndarray, kind: str) -> Any:
    """x as bfloat16, or (values int8, step, centre)."""
    if kind == "bfloat16":
        return to_bfloat16(x)
    centre = mean.astype(f32)
    step = norm_step(low, high, centre)
    y = (x - column(centre, x.ndim)) * column(f32(1) / step, x.ndim)
    clamped = np.rint(np.clip(y, f32(-127), f32(127)))
    return np.where(np.isnan(y), f32(0), clamped).astype(np.int8), step, centre


def kept_value(x: Any) -> np.ndarray:
    if not isinstance(x, tuple):
        return x
    values, step, centre = x
    return values.astype(f32) * column(step, values.ndim) + column(centre, values.ndim)


def masked_gradient(g: np.ndarray, x: np.ndarray, a: Any, b: Any, mask: Any, activation: str) -> np.ndarray:
    """The gradient of z."""
    if activation in SMOOTH:
        return g * slope(linear(x, a, b, None), activation)
    if mask is not None:
        return np.where(unpack_mask(mask, g.shape), g, f32(0)).astype(f32)
    return g if activation == "none" else np.where(passes(linear(x, a, b, None), activation), g, f32(0)).astype(f32)


def normalize_grad_sums(g: np.ndarray, x: Any, a: Any, b: Any, mask: Any, activation: str) -> tuple[np.ndarray, ...]:
    """Σgm, Σ gm·x, Σgm², gm."""
    wide = kept_value(x)
    gm = masked_gradient(g, wide, a, b, mask, activation)
    rows = statistics.rows_of(gm).astype(np.float64)
    dot = statistics.ordered_sum(rows * statistics.rows_of(wide).astype(np.float64))
    return statistics.ordered_sum(rows), dot, statistics.ordered_sum(rows * rows), gm


def normalize_grad(g: np.ndarray, x: Any, a: Any, b: Any, mask: Any, activation: str, p: Any, q: Any, r: Any) -> np.ndarray:
    """dx = (p·gm + q·x) + r."""
    wide = kept_value(x)
    gm = masked_gradient(g, wide, a, b, mask, activation)
    return (column(p, g.ndim) * gm + column(q, g.ndim) * wide) + column(r, g.ndim)
