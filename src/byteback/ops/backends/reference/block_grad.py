# SPDX-License-Identifier: Apache-2.0
"""The backward passes of a fused block in plain PyTorch, and what two int8 copies of its gradient need.

Legend: g is (N, C, ...), float32 or bfloat16, x is the saved input of the norm, vectors (p, q, r) have one float32 per channel.
Every operation is float32 and rounds once, in the order written. Sums are the ordered float64 sums of statistics.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from byteback.ops.activations import TABLE
from byteback.ops.backends.reference import statistics
from byteback.ops.backends.reference.block import column, pre_activation, unpack_mask
from byteback.ops.backends.reference.norm import gradient_sums, norm_gradient
from byteback.ops.backends.reference.quantize import quantize, quantize_pair
from byteback.ops.contract.layout import channels_last
from byteback.ops.types import GradientParts, GradSums, Kept, NormGradient, QTensor


def kept_value(x: Kept) -> Tensor:
    """Returns the saved input of a norm as a float32 tensor."""
    if isinstance(x, Tensor):
        return x.to(torch.float32)
    values, step, centre = x
    return values.to(torch.float32) * column(step, values) + column(centre, values)


def masked_gradient(g: Tensor, x: Tensor, a: Tensor | None, b: Tensor | None, mask: Tensor | None, activation: str) -> Tensor:
    """Returns gm, the gradient of z."""
    row = TABLE[activation]
    if mask is not None and not row.is_smooth:
        return torch.where(unpack_mask(mask, g), g, 0.0)
    if activation == "none":
        return g
    assert a is not None and b is not None
    slope = row.derivative(pre_activation(x, a, b, None))
    return g * slope if row.is_smooth else torch.where(slope, g, 0.0)


def masked_dtype(g: Tensor, activation: str) -> torch.dtype:
    """Returns the dtype in which gm is stored: that of g, of which it is a part. Its product with a slope is float32."""
    return torch.float32 if TABLE[activation].is_smooth else g.dtype


@torch.no_grad()
def normalize_grad_sums(
    g: Tensor,
    x: Kept,
    a: Tensor | None,
    b: Tensor | None,
    mask: Tensor | None,
    activation: str,
    want_masked: bool,
    want_squares: bool,
) -> GradSums:
    """Returns Σgm, Σ gm·x, Σgm² and gm."""
    wide = kept_value(x)
    masked = masked_gradient(g.float(), wide, a, b, mask, activation)
    rows = statistics.rows_of(masked).double()
    total, dot = statistics.ordered_sum(rows), statistics.ordered_sum(rows * statistics.rows_of(wide).double())
    squares = statistics.ordered_sum(rows * rows) if want_squares else None
    return GradSums(total, dot, squares, channels_last(masked).to(masked_dtype(g, activation)) if want_masked else None)


@torch.no_grad()
def add_waiting(x: Tensor, g: Tensor, mask: Tensor | None) -> Tensor:
    """Returns x + gm."""
    return channels_last(x + masked_gradient(g.float(), x, None, None, mask, "none"))


@torch.no_grad()
def normalize_grad(parts: GradientParts) -> Tensor:
    """Returns dx = (p·gm + q·x) + r."""
    g, x, a, b, mask, activation, p, q, r = parts
    wide, g = kept_value(x), g.float()
    gm = masked_gradient(g, wide, a, b, mask, activation)
    return channels_last((column(p, g) * gm + column(q, g) * wide) + column(r, g))


def normalize_grad_quantize(parts: GradientParts, clip: Tensor, key: Tensor | None) -> QTensor:
    """Returns dx as int8."""
    dx = normalize_grad(parts)
    return quantize(dx, clip.reshape((1,) * dx.dim()), key)


def normalize_grad_batch(
    g: Tensor,
    x: Kept,
    a: Tensor,
    b: Tensor | None,
    mask: Tensor | None,
    activation: str,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
    want_masked: bool,
    want_sums: bool,
) -> NormGradient:
    """Calls normalize_grad_sums, norm_gradient and (gradient_sums)."""
    seen = normalize_grad_sums(g, x, a, b, mask, activation, want_masked, want_sums)
    count = g.numel() // max(g.shape[1], 1)
    q, r, gamma, beta = norm_gradient(a, mean, invstd, seen.total, seen.dot, count)
    sums = None
    if seen.squares is not None:
        sums = gradient_sums(a, q, r, mean, invstd, eps, seen.total, seen.dot, seen.squares, count)
    return NormGradient(q, r, gamma, beta, seen.masked, sums)


def normalize_grad_tails(parts: GradientParts, per_channel: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns max|dx| of each channel, and how many of its |dx| exceed the threshold of the channel and that of the tensor."""
    dx = normalize_grad(parts)
    return statistics.absmax(dx, 1), *statistics.tail_count_pair(dx, per_channel, threshold)


def normalize_grad_quantize_pair(
    parts: GradientParts, clip: Tensor, clip_per_channel: Tensor, key: Tensor | None
) -> tuple[QTensor, QTensor]:
    """Returns quantize_pair of dx."""
    return quantize_pair(normalize_grad(parts), clip, clip_per_channel, key)


@torch.no_grad()
def normalize_grad_quantize_by_ratio(parts: GradientParts, ratio: float, key: Tensor | None) -> tuple[Tensor, QTensor]:
    """Returns clip = ratio · max|dx| of each channel, and dx as int8 by this clip."""
    dx = normalize_grad(parts)
    clip = statistics.absmax(dx, 1) * ratio
    return clip, quantize(dx, clip, key)
