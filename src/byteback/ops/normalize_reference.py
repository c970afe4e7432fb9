# SPDX-License-Identifier: Apache-2.0
"""The fused block's elementwise passes in plain PyTorch: what `normalize.py` promises, on any device.

Legend: x, g, residual are (N, C, ...); vectors (a, b, p, q, r) hold one float32 per channel. Every operation is float32 and
rounds once, in the order written; sums are the ordered float64 sums of statistics.py. Results lie channels last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from byteback.ops import reference, statistics
from byteback.ops.limits import QMAX, ZERO_SCALE
from byteback.ops.rounded_once import divided_by, inverse

# exp(t) = 2^n · e^r: n = round(t · log2 e), r = (t - n · LN2_HIGH) - n · LN2_LOW (n · LN2_HIGH is exact),
# e^r = ((c5 r + c4) r² + (c3 r + c2)) r² + r + 1 with the smallest greatest error for |r| <= ln2 / 2.
_EXP_LOWEST, _EXP_HIGHEST = -87.0, 89.0  # below, 1 + exp(t) is 1; above, n is 128, whose 2^n has the bits of infinity
_LOG2_E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440054690583e-4
_C2, _C3, _C4, _C5 = 0.499992311000824, 0.16667115688323975, 0.04189033433794975, 0.008312501944601536

Kept = Tensor | tuple[Tensor, Tensor, Tensor]
"""BatchNorm's input as it was kept: float32, bfloat16, or (values int8, step (C,), centre (C,))."""

Residual = Tensor | tuple[Tensor, Tensor] | None
"""What is added before the activation: float32, or (values int8, scale) for values · scale."""


class GradientParts(NamedTuple):
    """dx = (p·gm + q·x) + r, not written out: gm is g through the activation's derivative, x as it was kept.

    a, b and mask say how the activation went (`normalize_grad_sums`); vectors are (C,).
    """

    g: Tensor
    x: Kept
    a: Tensor | None
    b: Tensor | None
    mask: Tensor | None
    activation: str
    p: Tensor
    q: Tensor
    r: Tensor


class Into(NamedTuple):
    """Where a pass writes instead of into tensors of its own: channels [start, start + C) of tensors (N, width, ...) that lie
    dense, channels last."""

    values: Tensor | None
    output: Tensor | None
    pitch: int  # the width: elements from pixel to pixel


def channels_last(x: Tensor) -> Tensor:
    """x with dense (N, ..., C) memory."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def column(vector: Tensor, x: Tensor) -> Tensor:
    """A vector over the channels, shaped to broadcast over x."""
    return vector.reshape(1, -1, *(1,) * (x.dim() - 2))


def exponential(t: Tensor) -> Tensor:
    """exp(t) as a fixed sequence of float32 operations; relative error below 2e-7, infinite from 88.4 on.

    >>> exponential(torch.tensor([0.0, -1000.0, 1000.0])).tolist()
    [1.0, 1.64581...e-38, inf]
    """
    t = torch.where(t < _EXP_LOWEST, _EXP_LOWEST, torch.where(t > _EXP_HIGHEST, _EXP_HIGHEST, t))
    n = torch.round(t * _LOG2_E)
    r = (t - n * _LN2_HIGH) - n * _LN2_LOW
    square = r * r
    tail = (_C5 * r + _C4) * square + (_C3 * r + _C2)
    whole = torch.where(torch.isnan(n), 0.0, n).to(torch.int32)
    return ((tail * square + r) + 1.0) * ((whole + 127) << 23).view(torch.float32)


def _above_zero(z: Tensor) -> Tensor:
    """max(z, 0); a NaN stays one, -0 becomes +0."""
    return torch.where(z <= 0.0, 0.0, z)


def _below_six(z: Tensor) -> Tensor:
    return torch.where(z > 6.0, 6.0, z)


def activate(z: Tensor, activation: str) -> Tensor:
    """The activation itself."""
    if activation == "relu":
        return _above_zero(z)
    if activation == "relu6":
        return _below_six(_above_zero(z))
    if activation == "hardswish":
        return divided_by(z * _below_six(_above_zero(z + 3.0)), 6.0)
    if activation == "silu":
        return z / (1.0 + exponential(-z))
    return z


def passes(z: Tensor, activation: str) -> Tensor:
    """Where none, relu and relu6 let the gradient through."""
    if activation == "none":
        return torch.ones_like(z, dtype=torch.bool)
    return (z > 0.0) & (z < 6.0) if activation == "relu6" else z > 0.0


def _slope(z: Tensor, activation: str) -> Tensor:
    """The derivative of hardswish and silu."""
    if activation == "hardswish":
        return torch.where(z < -3.0, 0.0, torch.where(z <= 3.0, divided_by(z, 3.0) + 0.5, 1.0))
    s = inverse(1.0 + exponential(-z))
    return s * (1.0 + z * (1.0 - s))


# ---- masks -----------------------------------------------------------------------------------------------------------


def pack_mask(bits: Tensor) -> Tensor:
    """(N, C, ...) booleans as (pixels, ceil(C / 8)) bytes: bit c % 8 of byte c // 8, padding bits 0."""
    rows = statistics.rows_of(bits)
    rows = torch.nn.functional.pad(rows.to(torch.uint8), (0, -rows.shape[1] % 8))
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=bits.device)
    return (rows.reshape(rows.shape[0], rows.shape[1] // 8, 8) * weights).sum(-1, dtype=torch.uint8)


def unpack_mask(mask: Tensor, x: Tensor) -> Tensor:
    """The booleans of a mask, shaped as x."""
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    bits = (mask.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : x.shape[1]]
    return bits.bool().reshape(x.movedim(1, -1).shape).movedim(-1, 1)


# ---- forward ---------------------------------------------------------------------------------------------------------


def channel_stats(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = statistics.rows_of(x)
    wide = rows.double()
    total, squares = statistics.ordered_sum(wide), statistics.ordered_sum(wide * wide)
    if rows.shape[0] == 0:
        return total, squares, x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
    return total, squares, rows.amin(0) + 0.0, rows.amax(0) + 0.0  # adding +0 leaves one kind of zero


def _z(x: Tensor, a: Tensor, b: Tensor, residual: Residual) -> Tensor:
    z = column(a, x) * x + column(b, x)
    if isinstance(residual, tuple):
        values, scale = residual
        return z + values.to(torch.float32) * scale
    return z if residual is None else z + residual


def normalize_peak(x: Tensor, a: Tensor, b: Tensor, residual: Residual, activation: str) -> Tensor:
    return statistics.absmax(activate(_z(x, a, b, residual), activation), -1).reshape(())


def normalize(
    x: Tensor, a: Tensor, b: Tensor, residual: Residual, activation: str, clip: Tensor | None, want_mask: bool
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """values, scale, output, mask, counts."""
    z = _z(x, a, b, residual)
    output = channels_last(activate(z, activation))
    mask = pack_mask(passes(z, activation)) if want_mask else None
    if clip is None:
        return None, None, output, mask, None
    values, scale, counts, _ = reference.quantize(output, clip.reshape((1,) * x.dim()), None)
    return values, scale, output, mask, counts


def norm_step(low: Tensor, high: Tensor, centre: Tensor) -> Tensor:
    """The int8 step of each channel: its farthest value is 127 steps from the centre."""
    reach = torch.maximum((low - centre).abs(), (high - centre).abs())
    return torch.where(statistics.is_live(reach), divided_by(reach, QMAX), ZERO_SCALE)


def pack_norm(x: Tensor, kept: Kept) -> None:
    """Fills `kept` with x."""
    if isinstance(kept, Tensor):
        kept.copy_(x)
        return
    values, step, centre = kept
    y = (x - column(centre, x)) * column(inverse(step), x)
    values.copy_(torch.where(torch.isnan(y), 0.0, y.clamp(-QMAX, QMAX).round()))


# ---- backward --------------------------------------------------------------------------------------------------------


def kept_value(x: Kept) -> Tensor:
    """BatchNorm's input as backward sees it."""
    if isinstance(x, Tensor):
        return x.to(torch.float32)
    values, step, centre = x
    return values.to(torch.float32) * column(step, values) + column(centre, values)


def masked_gradient(g: Tensor, x: Tensor, a: Tensor | None, b: Tensor | None, mask: Tensor | None, activation: str) -> Tensor:
    """gm, the gradient of z."""
    smooth = activation in ("hardswish", "silu")
    if mask is not None and not smooth:
        return torch.where(unpack_mask(mask, g), g, 0.0)
    if activation == "none":
        return g
    assert a is not None and b is not None
    z = _z(x, a, b, None)
    return g * _slope(z, activation) if smooth else torch.where(passes(z, activation), g, 0.0)


def normalize_grad_sums(
    g: Tensor, x: Kept, a: Tensor | None, b: Tensor | None, mask: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σgm, Σ gm·x, Σgm², gm"""
    wide = kept_value(x)
    masked = masked_gradient(g, wide, a, b, mask, activation)
    rows = statistics.rows_of(masked).double()
    dot = statistics.ordered_sum(rows * statistics.rows_of(wide).double())
    return statistics.ordered_sum(rows), dot, statistics.ordered_sum(rows * rows), channels_last(masked)


def normalize_grad(parts: GradientParts) -> Tensor:
    g, x, a, b, mask, activation, p, q, r = parts
    wide = kept_value(x)
    gm = masked_gradient(g, wide, a, b, mask, activation)
    return channels_last((column(p, g) * gm + column(q, g) * wide) + column(r, g))
