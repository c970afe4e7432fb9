# SPDX-License-Identifier: Apache-2.0
"""Magnitude-aware clips: by the shape of a gradient's distribution, max|g| itself or an average of it.

    σ² = Σg²/M - (Σg/M)²                            of M numbers, in float64
    Gaussian where the share of |g| > σ exceeds a threshold
    clip = max|g| where Gaussian (or at the first time), else before · keep + max|g| · add       in float32

`magnitude_clips` answers for the whole tensor and for each channel at once; the native version takes one reading of the
tensor for both tails, and its own arithmetic for the rest. `recipes/distribution_adaptive.py` says why.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.ops import layout, native, statistics
from byteback.ops.normalize_checks import path_for
from byteback.ops.pairs import tail_count_pair

_library: Any = native.library


class Average(NamedTuple):
    """The numbers of the rule above."""

    threshold: float
    keep: float
    add: float


class Clips(NamedTuple):
    """The clip of the tensor, (1, 1, 1, ...), those of its channels, (1, C, 1, ...), and the share of each that is Gaussian."""

    one: Tensor
    each: Tensor
    gaussian_one: float
    gaussian_each: float


def sigma(total: Tensor, squares: Tensor, count: int) -> Tensor:
    """The standard deviation of `count` numbers from their sums."""
    count = max(count, 1)
    mean = total / count
    return (squares / count - mean * mean).clamp_min(0.0).sqrt().float()


def average(rule: Average, peak: Tensor, tail: Tensor, count: int, before: Tensor | None) -> tuple[Tensor, float]:
    """The clips, given max|g| and how many of `count` |g| exceed σ, and the share that is Gaussian."""
    gaussian = tail.double() / max(count, 1) > rule.threshold
    clip = peak
    if before is not None:
        before = before.reshape(peak.shape)
        averaged = before * rule.keep + peak * rule.add
        # A channel that was all zero has nothing to average with: its next gradient is a first one.
        clip = torch.where(gaussian | (before == 0.0), peak, averaged)
    return clip, float(gaussian.double().mean()) if gaussian.numel() else 0.0


def magnitude_clips(
    rule: Average,
    x: Tensor,
    moments: tuple[Tensor, Tensor, Tensor],
    before_one: Tensor | None,
    before_each: Tensor | None,
) -> Clips:
    """Clips of x from ops.moments(x) and those of the last time (None at the first)."""
    peak, total, squares = moments
    path = path_for(x, peak, before_one, before_each)
    dense = all(t is None or t.is_contiguous() for t in (*moments, before_one, before_each))
    if path is None or not dense or not layout.is_last_dense(x.shape, x.stride()):
        return _clips(rule, x, moments, before_one, before_each)
    channels = x.shape[1]
    one, each = torch.empty((1,) * x.dim(), dtype=torch.float32), torch.empty_like(peak)
    shares = _library.magnitude_clips(
        path,
        x.numel() // channels,
        channels,
        x.data_ptr(),
        [tensor.data_ptr() for tensor in moments],
        [0 if tensor is None else tensor.data_ptr() for tensor in (before_one, before_each)],
        rule,
        [one.data_ptr(), each.data_ptr()],
        torch.get_num_threads(),
    )
    return Clips(one, each, *shares)


def _clips(
    rule: Average,
    x: Tensor,
    moments: tuple[Tensor, Tensor, Tensor],
    before_one: Tensor | None,
    before_each: Tensor | None,
) -> Clips:
    peak, total, squares = moments
    count = x.numel() // max(x.shape[1], 1)
    each = sigma(total, squares, count)
    one = sigma(statistics.sum_channels(total), statistics.sum_channels(squares), x.numel())
    tail, tail_one = tail_count_pair(x, each.reshape(-1), one)
    clip, gaussian = average(rule, statistics.absmax(peak, -1), tail_one.sum(dim=1, keepdim=True), x.numel(), before_one)
    clips, gaussian_each = average(rule, peak, tail, count, before_each)
    return Clips(clip, clips, gaussian, gaussian_each)
