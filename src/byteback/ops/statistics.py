# SPDX-License-Identifier: Apache-2.0
"""Statistics as operators: maxima, sums and counts of float tensors, and the terms of the cosine between x and quantized x.

Clips and so integers depend on them, so every backend gives the same bits (backends/reference/statistics.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from byteback.ops.backends import meta
from byteback.ops.backends.reference.statistics import sum_channels, sum_last
from byteback.ops.backends.registry import backend_for
from byteback.ops.checks import check_float, check_int8, check_one, check_stream, check_tensor, check_vector
from byteback.ops.contract.geometry import whole
from byteback.ops.dispatch import define
from byteback.ops.quantize import broadcasts, check_axis

__all__ = [
    "absmax",
    "channel_cosine_terms",
    "channel_stats",
    "cosine_slope_terms",
    "cosine_terms",
    "dot_terms",
    "moments",
    "sum_channels",
    "sum_last",
    "tail_count",
    "tail_count_pair",
]


def _absmax(x: Tensor, axis: int) -> Tensor:
    check_float("absmax", "x", x, least_rank=1)
    check_axis("absmax", x, axis)
    return backend_for("absmax", x).absmax(x, axis)


def _moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check_float("moments", "x", x)
    return backend_for("moments", x).moments(x)


def _tail_count(x: Tensor, threshold: Tensor) -> Tensor:
    check_float("tail_count", "x", x)
    one, per_channel = [1] * x.dim(), [1, x.shape[1], *[1] * (x.dim() - 2)]
    if threshold.dtype != torch.float32 or list(threshold.shape) not in (one, per_channel):
        raise ValueError(
            f"tail_count: threshold has shape {tuple(threshold.shape)} and dtype {threshold.dtype}, x has shape "
            f"{tuple(x.shape)}; it must be float32 of shape {tuple(one)}, or {tuple(per_channel)} for one per channel."
        )
    return backend_for("tail_count", x, threshold).tail_count(x, threshold)


def _dot_terms(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    check_float("dot_terms", "x", x)
    check_int8("dot_terms", values=values)
    if values.shape != x.shape or scale.dtype != torch.float32 or not broadcasts(scale, x):
        raise ValueError(
            f"dot_terms: x has shape {tuple(x.shape)}, values {tuple(values.shape)}, scale {tuple(scale.shape)} of "
            f"{scale.dtype}; values must have the shape of x, and scale must be float32 of the same rank, with size 1 along "
            "the axes that share it."
        )
    return backend_for("dot_terms", x, values, scale).dot_terms(x, values, scale)


def _check_clips(op: str, x: Tensor, clips: Tensor, rank: int) -> None:
    check_float(op, "x", x)
    if clips.dtype != torch.float32 or clips.dim() != rank:
        raise ValueError(
            f"{op}: the clip has shape {tuple(clips.shape)} and dtype {clips.dtype}; it must be float32 with {rank} axes, "
            "because this operator measures clips for the whole tensor. Reshape it."
        )


def _cosine_terms(x: Tensor, clips: Tensor, stochastic: bool) -> Tensor:
    _check_clips("cosine_terms", x, clips, 1)
    return backend_for("cosine_terms", x, clips).cosine_terms(x, clips, stochastic)


def _channel_cosine_terms(x: Tensor, clips: Tensor, stochastic: bool) -> Tensor:
    check_float("channel_cosine_terms", "x", x)
    if clips.dtype != torch.float32 or clips.dim() != 2 or clips.shape[1] != x.shape[1]:
        raise ValueError(
            f"channel_cosine_terms: clips has shape {tuple(clips.shape)} and dtype {clips.dtype}, x has shape "
            f"{tuple(x.shape)}; it must be float32 (candidates, {x.shape[1]}), one clip for each channel. Expand it."
        )
    return backend_for("channel_cosine_terms", x, clips).channel_cosine_terms(x, clips, stochastic)


def _cosine_slope_terms(x: Tensor, clip: Tensor) -> Tensor:
    _check_clips("cosine_slope_terms", x, clip, 0)
    return backend_for("cosine_slope_terms", x, clip).cosine_slope_terms(x, clip)


_absmax_operator = define("absmax(Tensor x, int axis) -> Tensor", _absmax, meta.absmax)
_moments_operator = define("moments(Tensor x) -> (Tensor, Tensor, Tensor)", _moments, meta.moments)
_tail_count_operator = define("tail_count(Tensor x, Tensor threshold) -> Tensor", _tail_count, meta.tail_count)
_dot_terms_operator = define("dot_terms(Tensor x, Tensor values, Tensor scale) -> Tensor", _dot_terms, meta.dot_terms)
_cosine_terms_operator = define(
    "cosine_terms(Tensor x, Tensor clips, bool stochastic) -> Tensor", _cosine_terms, meta.cosine_terms
)
_channel_cosine_terms_operator = define(
    "channel_cosine_terms(Tensor x, Tensor clips, bool stochastic) -> Tensor", _channel_cosine_terms, meta.channel_cosine_terms
)
_cosine_slope_terms_operator = define(
    "cosine_slope_terms(Tensor x, Tensor clip) -> Tensor", _cosine_slope_terms, meta.cosine_slope_terms
)


# ---- the functions of byteback.ops -----------------------------------------------------------------------------------


def absmax(x: Tensor, axis: int = -1) -> Tensor:
    """Returns max|x| of the whole tensor (-1) or for each index of `axis`. The other axes have size 1. NaN if any x is NaN.

    >>> absmax(torch.tensor([[1.0, -3.0], [2.0, 0.5]]), axis=1).tolist()
    [[2.0, 3.0]]
    """
    return _absmax_operator(x, whole("absmax", "axis", axis))


def moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns max|x|, Σx and Σx² of each channel, each of shape (1, C, 1, ...). The sums are float64 with defined bits.

    >>> [m.flatten().tolist() for m in moments(torch.tensor([[1.0, -3.0], [2.0, 0.5]]))]
    [[2.0, 3.0], [3.0, -2.5], [5.0, 9.25]]
    """
    return _moments_operator(x)


def tail_count(x: Tensor, threshold: Tensor) -> Tensor:
    """Returns how many |x| of each channel exceed the threshold (one for all, or one per channel)."""
    return _tail_count_operator(x, threshold)


def dot_terms(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Returns (x·x̂, x̂·x̂, x·x) in float64, with x̂ = values · scale, for the cosine between x and quantized x.

    >>> q = torch.tensor([[6, 8]], dtype=torch.int8)
    >>> dot_terms(torch.tensor([[3.0, 4.0]]), q, torch.tensor([[0.5]])).tolist()
    [25.0, 25.0, 25.0]
    """
    return _dot_terms_operator(x, values, scale)


def cosine_terms(x: Tensor, clips: Tensor, stochastic: bool = False) -> Tensor:
    """Returns a row (x·q, q·q, x·x) for each candidate clip, with q quantized with that clip and rounded to nearest.

    With `stochastic` the terms are the expected values for stochastic rounding: x·q is x·y and q·q is Σ (y² + f (1 - f)), where
    y is the number before rounding and f its fractional part.

    >>> x = torch.tensor([[127.0, 31.75]])
    >>> cosine_terms(x, torch.tensor([127.0])).tolist(), cosine_terms(x, torch.tensor([127.0]), stochastic=True).tolist()
    ([[17145.0, 17153.0, 17137.0625]], [[17137.0625, 17137.25, 17137.0625]])
    """
    return _cosine_terms_operator(x, clips, stochastic)


def channel_cosine_terms(x: Tensor, clips: Tensor, stochastic: bool = False) -> Tensor:
    """Returns `cosine_terms` of each channel, (candidates, 3, C), for clips (candidates, C) with one clip per channel.

    >>> x = torch.tensor([[127.0, 2.0]])
    >>> channel_cosine_terms(x, torch.tensor([[127.0, 127.0], [127.0, 2.0]]))[:, 1].tolist()
    [[16129.0, 4.0], [16129.0, 16129.0]]
    """
    return _channel_cosine_terms_operator(x, clips, stochastic)


def cosine_slope_terms(x: Tensor, clip: Tensor) -> Tensor:
    """Returns (x·q, q·q, x·x, x·d, q·d), where d is 127 times the derivative of the quantized tensor by its clip."""
    return _cosine_slope_terms_operator(x, clip)


def channel_stats(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns Σx, Σx² (float64, defined bits), min x and max x (float32; NaN if any element is NaN) of each channel, all (C,).

    >>> [s.tolist() for s in channel_stats(torch.tensor([[1.0, -3.0], [2.0, 0.5]]))]
    [[3.0, -2.5], [5.0, 9.25], [1.0, -3.0], [2.0, 0.5]]
    """
    x = check_stream("channel_stats", "x", x)
    return backend_for("channel_stats", x).channel_stats(x)


def tail_count_pair(x: Tensor, per_channel: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Returns tail_count with a threshold per channel, (C,), and with one for all: two int64 tensors (1, C, 1, ...).

    >>> x = torch.tensor([[1.0, -3.0], [2.0, 0.5]])
    >>> [count.tolist() for count in tail_count_pair(x, torch.tensor([0.5, 4.0]), torch.tensor(0.75))]
    [[[2, 0]], [[2, 1]]]
    """
    op = "tail_count_pair"
    x = check_tensor(op, "x", x)
    per_channel = check_vector(op, "per_channel", per_channel, x.shape[1])
    threshold = check_one(op, "threshold", threshold)
    return backend_for(op, x, per_channel, threshold).tail_count_pair(x, per_channel, threshold)
