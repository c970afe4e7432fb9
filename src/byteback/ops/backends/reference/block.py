# SPDX-License-Identifier: Apache-2.0
"""The forward passes of a fused block in plain PyTorch: convolution, BatchNorm, residual, activation, int8.

Legend: x and residual are (N, C, ...), float32 or bfloat16; vectors (a, b) have one float32 per channel. Every operation is
float32 and rounds once, in the order written. Sums are the ordered float64 sums of statistics.py. Results are channels last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from byteback.ops.activations import TABLE
from byteback.ops.backends.reference import statistics
from byteback.ops.backends.reference.norm import norm_coefficients
from byteback.ops.backends.reference.products import product
from byteback.ops.backends.reference.quantize import quantize
from byteback.ops.contract.bfloat16 import to_bfloat16
from byteback.ops.contract.layout import channels_last
from byteback.ops.contract.limits import QMAX, ZERO_SCALE
from byteback.ops.contract.rounded_once import divided_by, inverse
from byteback.ops.types import BatchNorm, Extremes, Into, Kept, Normalized, NormState, ProductCall, QTensor, Residual, Wants


def stored_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a float32 tensor as it is stored: itself, or rounded to bfloat16."""
    return to_bfloat16(x) if dtype is torch.bfloat16 else x


def column(vector: Tensor, x: Tensor) -> Tensor:
    """Returns a vector over the channels in a shape that broadcasts over x."""
    return vector.reshape(1, -1, *(1,) * (x.dim() - 2))


def pack_mask(bits: Tensor) -> Tensor:
    """Returns (N, C, ...) booleans as (pixels, ceil(C / 8)) bytes: bit c % 8 of byte c // 8, padding bits are 0."""
    rows = statistics.rows_of(bits)
    rows = torch.nn.functional.pad(rows.to(torch.uint8), (0, -rows.shape[1] % 8))
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=bits.device)
    return (rows.reshape(rows.shape[0], rows.shape[1] // 8, 8) * weights).sum(-1, dtype=torch.uint8)


def unpack_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Returns the booleans of a mask in the shape of x."""
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    bits = (mask.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : x.shape[1]]
    return bits.bool().reshape(x.movedim(1, -1).shape).movedim(-1, 1)


def pre_activation(x: Tensor, a: Tensor, b: Tensor, residual: Residual) -> Tensor:
    """Returns z = a·x + b + residual."""
    z = column(a, x) * x.to(torch.float32) + column(b, x)
    if isinstance(residual, QTensor):
        return z + residual.values.to(torch.float32) * residual.scale
    return z if residual is None else z + residual.to(torch.float32)


@torch.no_grad()
def normalize_peak(x: Tensor, a: Tensor, b: Tensor, residual: Residual, activation: str) -> Tensor:
    """Returns max|activation(z)|, 0-dim."""
    return statistics.absmax(TABLE[activation].value(pre_activation(x, a, b, residual)), -1).reshape(())


@torch.no_grad()
def normalize(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    residual: Residual,
    activation: str,
    clip: Tensor | None,
    want_float: bool,
    want_mask: bool,
    keep: str | None,
    extremes: Extremes | None,
    into: Into | None,
) -> Normalized:
    """Returns activation(z) as int8 by `clip` and as float32, its mask, and x for backward."""
    row, z = TABLE[activation], pre_activation(x, a, b, residual)
    output = channels_last(row.value(z))
    mask = pack_mask(row.derivative(z)) if want_mask and not row.is_smooth else None
    q = None
    if clip is not None:
        q = quantize(output, clip.reshape((1,) * x.dim()), None)._replace(peak=None)  # the native library does not compute it
    if into is not None:
        q = q if into.values is None or q is None else q._replace(values=into.values.copy_(q.values))
        output = output if into.output is None or not want_float else into.output.copy_(output)
    kept = None if keep is None else pack_norm(x, keep, extremes)
    return Normalized(q, output if want_float else None, mask, kept)


def norm_step(low: Tensor, high: Tensor, centre: Tensor) -> Tensor:
    """Returns the int8 step of each channel. The value farthest from the centre is 127 steps away."""
    reach = torch.maximum((low - centre).abs(), (high - centre).abs())
    return torch.where(statistics.is_live(reach), divided_by(reach, QMAX), ZERO_SCALE)


@torch.no_grad()
def pack_norm(x: Tensor, keep: str, extremes: Extremes | None) -> Kept:
    """Returns x as bfloat16, or as int8 around the mean of each channel."""
    if extremes is None:
        return to_bfloat16(x)
    low, high, centre = extremes
    step = norm_step(low, high, centre)
    y = (x.to(torch.float32) - column(centre, x)) * column(inverse(step), x)
    values = torch.empty_like(x, dtype=torch.int8)
    return values.copy_(torch.where(torch.isnan(y), 0.0, y.clamp(-QMAX, QMAX).round())), step, centre


@torch.no_grad()
def normalize_batch(x: Tensor, norm: BatchNorm, residual: Residual, activation: str, wants: Wants) -> Normalized:
    """Calls channel_stats, norm_coefficients, (normalize_peak) and normalize."""
    is_known = residual is None and TABLE[activation].is_monotone
    stats, count = statistics.channel_stats(x), x.numel() // max(x.shape[1], 1)
    a, b, mean, invstd, peak = norm_coefficients(stats, count, norm, activation)
    if wants.int8 and not is_known:
        peak = normalize_peak(x, a, b, residual, activation)
    made = Normalized()
    if any(wants[:4]):
        clip = peak if wants.int8 else None
        extremes = (stats[2], stats[3], mean.float()) if wants.keep == "int8" else None
        made = normalize(x, a, b, residual, activation, clip, wants.float, wants.mask, wants.keep, extremes, None)
        made = made if made.output is None else made._replace(output=stored_as(made.output, wants.output))
    return made._replace(norm=NormState(a, b, mean, invstd, peak if is_known or wants.int8 else None))


def conv_normalize(
    call: ProductCall,
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    a: Tensor,
    b: Tensor,
    residual: Residual,
    activation: str,
    clip: Tensor | None,
    want_float: bool,
    into: Into | None,
) -> Normalized:
    """Returns `normalize` of the output of a convolution."""
    y = channels_last(product(call, *operands))
    return normalize(y, a, b, residual, activation, clip, want_float, False, None, None, into)


def conv_normalize_batch(
    call: ProductCall,
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    norm: BatchNorm,
    residual: Residual,
    activation: str,
    wants: Wants,
) -> tuple[Tensor, Normalized]:
    """Returns the output of a convolution, channels last, and `normalize_batch` of it."""
    y = stored_as(channels_last(product(call, *operands)), wants.y)
    return y, normalize_batch(y, norm, residual, activation, wants)
