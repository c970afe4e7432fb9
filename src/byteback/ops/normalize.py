# SPDX-License-Identifier: Apache-2.0
"""The elementwise passes of the fused training block: convolution → BatchNorm → (residual add) → activation → int8.

BatchNorm with the statistics of its batch is one multiplication and one addition per channel, so that forward is one or two
passes over the convolution's output; `normalize_grad.py` has the passes back. Plain functions for tensors without gradients,
outside torch.compile; `normalize_reference.py` is their definition, `csrc/norm.h` the fast path, and both give the same bits.

Legend: x, residual are float32 (N, C, ...), a residual may also be (values int8, scale), which stands for values · scale;
a, b are float32 vectors (C,). Each operation rounds to float32 once, in the order written. z = a·x + b (+ residual).
Results lie channels last. NaN inputs give NaN.

    activation   value                           derivative
    none         z                               1
    relu         max(z, 0)                       z > 0
    relu6        min(max(z, 0), 6)               0 < z < 6
    hardswish    (z · min(max(z+3, 0), 6)) / 6   0 below -3, z/3 + 0.5 up to 3, then 1
    silu         z / (1 + exp(-z))               s · (1 + z · (1 - s)), s = 1 / (1 + exp(-z))

A mask keeps the derivative of none, relu and relu6 as bits: uint8 (pixels, ceil(C / 8)), bit c % 8 of byte c // 8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from byteback.addresses import same_device
from byteback.ops import normalize_native as kernels
from byteback.ops import normalize_reference as plain
from byteback.ops import pool
from byteback.ops.normalize_checks import (
    ACTIVATIONS,
    SMOOTH,
    check_activation,
    check_into,
    check_one,
    check_residual,
    check_tensor,
    check_vector,
    path_for,
    tensors_of,
)
from byteback.ops.normalize_reference import Into, Kept, Residual

__all__ = [
    "ACTIVATIONS",
    "Into",
    "Kept",
    "Normalized",
    "Residual",
    "SMOOTH",
    "channel_stats",
    "normalize_peak",
    "normalize",
    "pack_norm",
]


class Normalized(NamedTuple):
    """What one pass of `normalize` gave; None where it was not asked for."""

    values: Tensor | None
    scale: Tensor | None
    output: Tensor | None
    mask: Tensor | None
    counts: Tensor | None
    kept: Kept | None = None


def channel_stats(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per channel Σx, Σx² (float64, defined bits), min x and max x (float32; NaN if any element is): four vectors (C,).

    >>> [s.tolist() for s in channel_stats(torch.tensor([[1.0, -3.0], [2.0, 0.5]]))]
    [[3.0, -2.5], [5.0, 9.25], [1.0, -3.0], [2.0, 0.5]]
    """
    op = "channel_stats"
    x = check_tensor(op, "x", x)
    path = path_for(op, x)
    if path is not None:
        return kernels.channel_stats(path, x)
    with torch.no_grad():
        return plain.channel_stats(x)


def normalize_peak(x: Tensor, a: Tensor, b: Tensor, residual: Residual, activation: str) -> Tensor:
    """max|activation(a·x + b + residual)| as a 0-dim tensor; NaN if any element is, 0 for an empty tensor.

    >>> normalize_peak(torch.tensor([[1.0], [-4.0]]), torch.tensor([2.0]), torch.tensor([1.0]), None, "relu").item()
    3.0
    """
    op = "normalize_peak"
    x = check_tensor(op, "x", x)
    channels = x.shape[1]
    a, b, index = check_vector(op, "a", a, channels), check_vector(op, "b", b, channels), check_activation(op, activation)
    residual = check_residual(op, residual, x)
    path = path_for(op, x, a, b, *tensors_of(residual))
    if path is not None:
        return kernels.normalize_peak(path, x, a, b, residual, index)
    with torch.no_grad():
        return plain.normalize_peak(x, a, b, residual, activation)


def normalize(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    residual: Residual,
    activation: str,
    clip: Tensor | None,
    *,
    want_float: bool,
    want_mask: bool,
    keep: str | None = None,
    low: Tensor | None = None,
    high: Tensor | None = None,
    mean: Tensor | None = None,
    into: Into | None = None,
) -> Normalized:
    """y = activation(a·x + b + residual): as int8 by `clip` (one float32; None: no int8), as float32, its mask; in one pass.

    values, scale and counts are those of ops.quantize(y, clip). hardswish and silu have no mask (None): backward takes z again.
    `keep` also gives pack_norm(x, low, high, mean, keep) as `kept`, without another reading of x. `into` names where values and
    output are written: parts of wider tensors, for a concatenation.

    >>> x, one = torch.tensor([[1.0, -3.0]]), torch.ones(2)
    >>> result = normalize(x, one, one, None, "relu", torch.tensor(2.0), want_float=True, want_mask=True)
    >>> result.values.tolist(), result.output.tolist(), result.mask.tolist(), result.counts.tolist()
    ([[127, 0]], [[2.0, 0.0]], [[1]], [0, 0])
    """
    op = "normalize"
    x = check_tensor(op, "x", x)
    channels = x.shape[1]
    a, b, index = check_vector(op, "a", a, channels), check_vector(op, "b", b, channels), check_activation(op, activation)
    residual = check_residual(op, residual, x)
    places = check_into(op, into, x, clip, want_float)
    clip = None if clip is None else check_one(op, "clip", clip)
    want_mask = want_mask and activation not in SMOOTH
    kept = None if keep is None else _room(op, x, low, high, mean, keep)
    path = path_for(op, x, a, b, *tensors_of(residual), clip, *tensors_of(kept), *places)
    if path is not None:
        return Normalized(*kernels.normalize(path, x, a, b, residual, index, clip, want_float, want_mask, kept, into))
    with torch.no_grad():
        values, scale, output, mask, counts = plain.normalize(x, a, b, residual, activation, clip, want_mask)
        if kept is not None:
            plain.pack_norm(x, kept)
        if into is not None:
            values = values if into.values is None or values is None else into.values.copy_(values)
            output = output if into.output is None or not want_float else into.output.copy_(output)
    return Normalized(values, scale, output if want_float else None, mask, counts, kept)


def _room(op: str, x: Tensor, low: Tensor | None, high: Tensor | None, mean: Tensor | None, kind: str) -> Kept:
    """An empty place for what pack_norm keeps, with its step and centre."""
    if kind == "bfloat16":
        return pool.empty_like(x, torch.bfloat16)
    if kind != "int8":
        raise ValueError(f"{op}: BatchNorm's input cannot be kept as {kind!r}; there are 'bfloat16' and 'int8'.")
    if low is None or high is None or mean is None:
        raise TypeError(f"{op}: int8 needs low, high and mean of each channel. Pass those of channel_stats.")
    channels = x.shape[1]
    centre = check_vector(op, "mean", mean.to(torch.float32), channels)
    low, high = check_vector(op, "low", low, channels), check_vector(op, "high", high, channels)
    same_device(op, (x, centre, low, high))
    with torch.no_grad():
        return pool.empty_like(x, torch.int8), plain.norm_step(low, high, centre), centre


def pack_norm(x: Tensor, low: Tensor | None, high: Tensor | None, mean: Tensor | None, kind: str) -> Kept:
    """BatchNorm's input, smaller, for backward: as bfloat16, or as int8 around each channel's mean.

    int8: step = max(|low - mean|, |high - mean|) / 127 (1 where that counts as zero), values = round((x - mean) · (1 / step))
    within ±127, returned with step and centre = mean, (C,) each; backward reads values · step + mean.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> values, step, centre = pack_norm(x, torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([2.0]), "int8")
    >>> values.tolist(), centre.tolist()
    ([[-127], [127]], [2.0])
    """
    op = "pack_norm"
    x = check_tensor(op, "x", x)
    kept = _room(op, x, low, high, mean, kind)
    path = path_for(op, x, *tensors_of(kept))
    if path is not None:
        kernels.pack_norm(path, x, kept)
    else:
        with torch.no_grad():
            plain.pack_norm(x, kept)
    return kept
