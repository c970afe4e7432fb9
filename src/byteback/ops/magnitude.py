# SPDX-License-Identifier: Apache-2.0
"""Magnitude-aware clips: by the shape of a gradient's distribution, max|g| itself or an average of it.

    σ² = Σg²/M - (Σg/M)²                            of M numbers, in float64
    Gaussian where the share of |g| > σ exceeds a threshold
    clip = max|g| where Gaussian (or at the first time), else before · keep + max|g| · add       in float32

`magnitude_clips` answers for the whole tensor and for each channel at once, `gradient_clips` for the fused block's gradient,
whose sums are known without reading it. `float_pair` and `gradient_pair` also make the int8 copies under these clips; the
last is one native call with two readings, for both tails (and max|g|) and for both copies. `recipes/distribution_adaptive.py`
says why.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.ops.backends.cpu import allocator, library
from byteback.ops.backends.cpu.addresses import flat, known, last, new
from byteback.ops.backends.cpu.block_grad import backward_of
from byteback.ops.backends.reference import statistics
from byteback.ops.backends.registry import backend_for
from byteback.ops.block_grad import normalize_grad_quantize_pair, normalize_grad_tails
from byteback.ops.checks import check_key, check_parts, check_tensor, check_vector
from byteback.ops.contract.rounded_once import divided_by, square_root
from byteback.ops.programs import Averaged
from byteback.ops.quantize import quantize_pair
from byteback.ops.statistics import moments, tail_count_pair
from byteback.ops.types import GradientParts, Quantized, tensors_of

_library: Any = library.native
_float32, _float64, _int64, _int8 = torch.float32, torch.float64, torch.int64, torch.int8


class Paired(NamedTuple):
    """int8 copies under clips: (values, scale) by one clip (None if not wanted) and by a clip per channel; how many values
    each cut off, and how many are NaN or Inf."""

    clips: Clips
    one: tuple[Tensor, Tensor] | None
    each: tuple[Tensor, Tensor]
    saturated: tuple[int, int]
    nonfinite: int


class Clips(NamedTuple):
    """The clip of the tensor, (1, 1, 1, ...), those of its channels, (1, C, 1, ...), and the share of each that is Gaussian."""

    one: Tensor
    each: Tensor
    gaussian_one: Tensor | float
    gaussian_each: Tensor | float

    def of(self, copy: int) -> tuple[Tensor, Tensor | float]:
        """The clip and the Gaussian share of the first or the second copy."""
        return (self.each, self.gaussian_each) if copy else (self.one, self.gaussian_one)


def sigma(total: Tensor, squares: Tensor, count: int) -> Tensor:
    """The standard deviation of `count` numbers from their sums."""
    count = max(count, 1)
    mean = divided_by(total, count)
    return square_root((divided_by(squares, count) - mean * mean).clamp_min(0.0)).float()


def average(rule: Averaged, peak: Tensor, tail: Tensor, count: int, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """The clips, given max|g| and how many of `count` |g| exceed σ, and the share that is Gaussian."""
    gaussian = divided_by(tail.double(), max(count, 1)) > rule.threshold
    clip = peak
    if before is not None:
        before = before.reshape(peak.shape)
        averaged = before * rule.keep + peak * rule.add
        # A channel that was all zero has nothing to average with: its next gradient is a first one.
        clip = torch.where(gaussian | (before == 0.0), peak, averaged)
    return clip, divided_by(gaussian.sum().double(), max(gaussian.numel(), 1))


Before = Tensor | None
"""The clips of the last time; None at the first."""


def magnitude_clips(
    rule: Averaged, x: Tensor, moments: tuple[Tensor, Tensor, Tensor], before_one: Before, before_each: Before
) -> Clips:
    """Clips of x from ops.moments(x) and those of the last time."""
    op = "magnitude_clips"
    x = check_tensor(op, "x", x)
    channels = x.shape[1]
    shape = (1, channels, *(1,) * (x.dim() - 2))
    peak, total, squares = (
        check_vector(op, name, moment.reshape(-1), channels, dtype)
        for name, moment, dtype in zip(("peak", "total", "squares"), moments, (_float32, _float64, _float64), strict=True)
    )
    before_one, before_each = _check_before(op, before_one, before_each, channels)
    path = backend_for(op, x, peak, total, squares, before_one, before_each).path
    if path is None:
        each, one = _sigmas(total.reshape(shape), squares.reshape(shape), x)
        return _averages(rule, x, peak.reshape(shape), *tail_count_pair(x, each, one), before_one, before_each)
    one, each = new((1,) * x.dim(), _float32), new(shape, _float32)
    shares = _library.magnitude_clips(
        path,
        _rule(rule, before_one, before_each, channels),
        rows=x.numel() // channels,
        channels=channels,
        x=last(x, _float32, x.numel()),
        peak=flat(peak, _float32, channels),
        total=flat(total, _float64, channels),
        squares=flat(squares, _float64, channels),
        clip=known(one),
        clips=known(each),
        threads=torch.get_num_threads(),
    )
    return Clips(one, each, *shares)


def _rule(rule: Averaged, before_one: Before, before_each: Before, channels: int) -> Any:
    """csrc/bindings/bindings_pairs.cpp's MagnitudeClips."""
    threshold, keep, add = rule
    last_one, last_each = flat(before_one, _float32, 1), flat(before_each, _float32, channels)
    return _library.MagnitudeClips(threshold=threshold, keep=keep, add=add, before_one=last_one, before_each=last_each)


def _check_before(op: str, one: Before, each: Before, channels: int) -> tuple[Before, Before]:
    """The clips of the last time as dense vectors."""
    return (
        None if one is None else check_vector(op, "before_one", one.reshape(-1), 1),
        None if each is None else check_vector(op, "before_each", each.reshape(-1), channels),
    )


def gradient_clips(
    rule: Averaged, parts: GradientParts, sums: tuple[Tensor, Tensor], before_one: Before, before_each: Before
) -> Clips:
    """Clips of the dx of normalize_grad, which is not written, from Σdx and Σdx² of each channel, (C,)."""
    g = parts.g
    shape = (1, -1, *(1,) * (g.dim() - 2))
    each, one = _sigmas(sums[0].reshape(shape), sums[1].reshape(shape), g)
    return _averages(rule, g, *normalize_grad_tails(parts, each, one), before_one, before_each)


def float_pair(
    rule: Averaged, x: Tensor, before_one: Before, before_each: Before, key: Tensor | None, *, want_one: bool
) -> Paired:
    """Copies of a float tensor under its magnitude-aware clips; `want_one`: also the one under a single clip."""
    clips = magnitude_clips(rule, x, moments(x), before_one, before_each)
    return _paired(clips, quantize_pair(x, clips.one, clips.each, key), want_one)


def gradient_pair(
    rule: Averaged,
    parts: GradientParts,
    sums: tuple[Tensor, Tensor],
    before_one: Before,
    before_each: Before,
    key: Tensor | None,
    *,
    want_one: bool,
) -> Paired:
    """`float_pair` of the dx of normalize_grad, which is not written, from Σdx and Σdx² of each channel, (C,)."""
    op = "gradient_pair"
    parts, key = check_parts(op, parts), check_key(op, key)
    g = parts.g
    channels = g.shape[1]
    total, squares = (check_vector(op, n, v, channels, _float64) for n, v in zip(("total", "squares"), sums, strict=True))
    before_one, before_each = _check_before(op, before_one, before_each, channels)
    read = (*tensors_of(parts.x), parts.a, parts.b, parts.mask, parts.p, parts.q, parts.r)
    path = backend_for(op, g, *read, total, squares, before_one, before_each, key).path
    if path is None:
        clips = gradient_clips(rule, parts, (total, squares), before_one, before_each)
        return _paired(clips, normalize_grad_quantize_pair(parts, clips.one, clips.each, key), want_one)
    single, per_channel = (1,) * g.dim(), (1, channels, *(1,) * (g.dim() - 2))
    clip, clip_each = new(single, _float32), new(per_channel, _float32)
    values_each, scale_each = allocator.empty_like(g, _int8), new(per_channel, _float32)
    values, scale = (allocator.empty_like(g, _int8), new(single, _float32)) if want_one else (None, None)
    gaussian, gaussian_each, saturated, saturated_each, nonfinite = _library.gradient_pair(
        path,
        backward_of(*parts),
        _rule(rule, before_one, before_each, channels),
        total=flat(total, _float64, channels),
        squares=flat(squares, _float64, channels),
        key=flat(key, _int64, 2),
        clip=known(clip),
        clips=known(clip_each),
        values=known(values),
        scale=known(scale),
        values_each=known(values_each),
        scale_each=known(scale_each),
        threads=torch.get_num_threads(),
    )
    clips = Clips(clip, clip_each, gaussian, gaussian_each)
    one = None if values is None or scale is None else (values, scale)
    return Paired(clips, one, (values_each, scale_each), (saturated, saturated_each), nonfinite)


def _paired(clips: Clips, made: tuple[Quantized, Quantized], want_one: bool) -> Paired:
    (values, scale, counts, _), (values_each, scale_each, counts_each, _) = made
    saturated = counts.tolist()[0] if want_one else 0
    one = (values, scale) if want_one else None
    return Paired(clips, one, (values_each, scale_each), (saturated, counts_each.tolist()[0]), counts_each.tolist()[1])


def _sigmas(total: Tensor, squares: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """σ of each channel, (C,), and of all of x, from sums (1, C, 1, ...)."""
    each = sigma(total, squares, x.numel() // max(x.shape[1], 1))
    return each.reshape(-1), sigma(statistics.sum_channels(total), statistics.sum_channels(squares), x.numel())


def _averages(
    rule: Averaged, x: Tensor, peak: Tensor, tail: Tensor, tail_one: Tensor, before_one: Before, before_each: Before
) -> Clips:
    all_of_them, count = tail_one.sum(dim=1, keepdim=True), x.numel() // max(x.shape[1], 1)
    one, gaussian = average(rule, statistics.absmax(peak, -1), all_of_them, x.numel(), before_one)
    each, gaussian_each = average(rule, peak, tail, count, before_each)
    return Clips(one, each, gaussian, gaussian_each)
