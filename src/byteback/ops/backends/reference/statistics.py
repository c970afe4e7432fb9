# SPDX-License-Identifier: Apache-2.0
"""Float statistics with defined bits: integers depend on them, so every path must compute the same bits.

Legend: x is (N, C, ...); a *row* is one pixel, rows run in N, (D,) H, W order; a channel is a column.

A float64 sum of a channel adds the rows of each block of 64 in order, then the blocks as a halving tree (block i and block
i + n/2, n a power of two, missing blocks are 0). A sum over the tensor adds the sums of the channels by the same tree. All
additions are elementwise, so their order does not depend on threads, memory formats or devices, and a kernel can use one
accumulator per channel. Products of two float32 are exact in float64. Maxima and counts do not depend on the order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from byteback.ops.contract.limits import QMAX, STATISTICS_BLOCK, TINY_CLIP


def _tree_sum(x: Tensor) -> Tensor:
    """Returns the halving-tree sum along the first axis."""
    count = max(x.shape[0], 1)
    padded = 1 << (count - 1).bit_length()
    x = torch.cat([x, x.new_zeros(padded - x.shape[0], *x.shape[1:])]) if padded != x.shape[0] else x
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        x = x[:half] + x[half:]
    return x[0]


def rows_of(x: Tensor) -> Tensor:
    """Reshapes (N, C, ...) to (rows, C)."""
    return x.movedim(1, -1).flatten(0, -2)


def ordered_sum(rows: Tensor) -> Tensor:
    """Returns the float64 sum of each column of `rows` (rows, C), in the order defined above."""
    blocks = -(-rows.shape[0] // STATISTICS_BLOCK)
    missing = blocks * STATISTICS_BLOCK - rows.shape[0]
    if missing:
        rows = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
    rows = rows.reshape(blocks, STATISTICS_BLOCK, rows.shape[1])
    total = rows[:, 0].clone()
    for row in range(1, STATISTICS_BLOCK):
        total += rows[:, row]
    return _tree_sum(total)


def sum_channels(per_channel: Tensor) -> Tensor:
    """Returns the sum over channels of a (1, C, 1, ...) statistic, in the order defined above, as a (1, 1, 1, ...) tensor."""
    return _tree_sum(per_channel.reshape(-1)).reshape((1,) * per_channel.dim())


def sum_last(values: Tensor) -> Tensor:
    """Returns the sum along the last axis, in the order defined above.

    >>> sum_last(torch.tensor([[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]])).tolist()
    [7.0, 3.0]
    """
    return _tree_sum(values.movedim(-1, 0))


@torch.no_grad()
def absmax(x: Tensor, axis: int) -> Tensor:
    """Returns max|x| along every axis but `axis` (all axes for -1), which have size 1 then. NaN if any element is NaN."""
    dims = [dim for dim in range(x.dim()) if dim != axis]
    shape = [x.shape[dim] if dim == axis else 1 for dim in range(x.dim())]
    if x.numel() == 0:
        return x.new_zeros(shape)
    return x.abs().amax(dim=dims, keepdim=True) if dims else x.abs()


def _column(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape(1, -1, *(1,) * (x.dim() - 2))


@torch.no_grad()
def moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns max|x| (float32) and the sums of x and x² (float64) of each channel, each (1, C, 1, ...)."""
    rows = rows_of(x).double()
    return absmax(x, 1), _column(ordered_sum(rows), x), _column(ordered_sum(rows * rows), x)


@torch.no_grad()
def tail_count(x: Tensor, threshold: Tensor) -> Tensor:
    """Returns how many |x| of each channel exceed `threshold` (one for all, or one per channel), as int64 (1, C, 1, ...)."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    return (x.abs() > threshold).sum(dim=dims, keepdim=True) if dims else (x.abs() > threshold).long()


def is_live(clip: Tensor) -> Tensor:
    """Whether a clip is valid: not so small that it is treated as zero, not infinite, not NaN."""
    return (clip >= TINY_CLIP) & (clip < math.inf)


def inverse_scale(clip: Tensor) -> Tensor:
    """Returns 127 / clip, rounded once. PyTorch computes `127 / tensor` as a reciprocal and a product, which rounds twice."""
    return clip.new_full((), float(QMAX)) / clip


def _nearest(x: Tensor, clip: Tensor) -> Tensor:
    """Returns the integers for `clip` with rounding to nearest, as float32; all 0 if the clip is treated as zero."""
    live = is_live(clip)
    y = x * inverse_scale(torch.where(live, clip, 1.0))
    return torch.where(live, y.clamp(-QMAX, QMAX).round(), 0.0)


def _sum_all(products: Tensor) -> Tensor:
    return _tree_sum(ordered_sum(products))


@torch.no_grad()
def dot_terms(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Returns (x·x̂, x̂·x̂, x·x) with x̂ = q · scale in float64, the terms of the cosine between x and quantized x.

    If each channel has one scale, it is multiplied with the sums of the channel, whose terms are then exact products.
    """
    rows, q = rows_of(x).double(), rows_of(values).double()
    square = _sum_all(rows * rows)
    if scale.numel() == scale.shape[1]:
        each = scale.double().reshape(-1)
        per_channel = ordered_sum(rows * q) * each, ordered_sum(q * q) * (each * each)
        return torch.stack([*map(_tree_sum, per_channel), square])
    quantized = rows_of(values.double() * scale.double())
    return torch.stack([_sum_all(rows * quantized), _sum_all(quantized * quantized), square])


def _scaled_size(x: Tensor, clip: Tensor) -> Tensor:
    """Returns |x| · 127 / clip, clamped but not rounded; all 0 if the clip is treated as zero."""
    live = is_live(clip)
    y = x.abs() * inverse_scale(torch.where(live, clip, 1.0))
    return torch.where(live, y.clamp(max=QMAX), 0.0)


def _expected_square(y: Tensor) -> Tensor:
    """Returns E[q²] if y = n + f is rounded stochastically, to n + 1 with probability f: n² + f (2n + 1), exact in float64."""
    n = y.floor()
    return n * n + (y - n) * (2.0 * n + 1.0)


@torch.no_grad()
def channel_cosine_terms(x: Tensor, clips: Tensor, stochastic: bool) -> Tensor:
    """Returns the sums x·q, q·q and x·x of each channel, (candidates, 3, C), for each row of `clips` (candidates, C or 1).

    q is rounded to nearest. With `stochastic` the sums are the expected values for stochastic rounding: E[q] = y, the number
    before rounding, so x·q becomes x·y, and q·q becomes Σ (y² + f (1 - f)), where f is the fractional part of y.
    """
    rows = rows_of(x)
    wide = rows.double()
    square = ordered_sum(wide * wide)
    terms = []
    for clip in clips:
        if stochastic:
            y = _scaled_size(rows, clip).double()
            sums = ordered_sum(wide.abs() * y), ordered_sum(_expected_square(y))
        else:
            q = _nearest(rows, clip).double()
            sums = ordered_sum(wide * q), ordered_sum(q * q)
        terms.append(torch.stack([*sums, square]))
    return torch.stack(terms) if terms else square.new_zeros(0, 3, square.shape[0])


@torch.no_grad()
def cosine_terms(x: Tensor, clips: Tensor, stochastic: bool) -> Tensor:
    """Returns the same sums over all channels, (candidates, 3), for clips of the whole tensor, (candidates,)."""
    return sum_last(channel_cosine_terms(x, clips.reshape(-1, 1), stochastic))


@torch.no_grad()
def cosine_slope_terms(x: Tensor, clip: Tensor) -> Tensor:
    """Returns (x·q, q·q, x·x, x·d, q·d) in float64, where d_i = 127 · ∂(clip · q_i / 127)/∂clip with a straight-through round.

    d_i = 127 sign(x_i) = q_i if |x_i| > clip, else q_i - 127 x_i / clip (spec A5). So the sums with d are computed from the
    other sums and from the same products over the elements beyond the clip, which are few.
    """
    rows = rows_of(x)
    wide, q = rows.double(), _nearest(rows, clip).double()
    products, squares, beyond = wide * q, wide * wide, rows.abs() > clip
    xq, qq, xx = _sum_all(products), (q * q).sum(), _sum_all(squares)
    if not is_live(clip):
        return torch.stack([xq, qq, xx, torch.zeros_like(xx), torch.zeros_like(xx)])
    rate = inverse_scale(clip.double())
    xd = xq - rate * (xx - _sum_all(torch.where(beyond, squares, 0.0)))
    qd = qq - rate * (xq - _sum_all(torch.where(beyond, products, 0.0)))
    return torch.stack([xq, qq, xx, xd, qd])


@torch.no_grad()
def channel_stats(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the sums of x and x² (float64), min x and max x (float32) of each channel, each (C,)."""
    rows = rows_of(x)
    wide = rows.double()
    total, squares = ordered_sum(wide), ordered_sum(wide * wide)
    if rows.shape[0] == 0:
        nothing = total.to(torch.float32)
        return total, squares, nothing, nothing.clone()
    low, high = rows.amin(0).to(torch.float32), rows.amax(0).to(torch.float32)
    return total, squares, low + 0.0, high + 0.0  # adding +0 converts -0 to +0


def tail_count_pair(x: Tensor, per_channel: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Returns tail_count with a threshold per channel, (C,), and with one for all."""
    return tail_count(x, _column(per_channel, x)), tail_count(x, threshold.reshape((1,) * x.dim()))
