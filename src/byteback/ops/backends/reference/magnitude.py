# SPDX-License-Identifier: Apache-2.0
"""Magnitude-aware clips in plain PyTorch (ops/magnitude.py has the rule)."""

from __future__ import annotations

import torch
from torch import Tensor

from byteback.ops.backends.reference.block_grad import normalize_grad_quantize_pair, normalize_grad_tails
from byteback.ops.backends.reference.statistics import absmax, sum_channels, tail_count_pair
from byteback.ops.contract.rounded_once import divided_by, square_root
from byteback.ops.programs import Averaged
from byteback.ops.types import Before, Clips, GradientParts, Paired, QTensor


def sigma(total: Tensor, squares: Tensor, count: int) -> Tensor:
    """Returns the standard deviation of `count` numbers from their sums."""
    count = max(count, 1)
    mean = divided_by(total, count)
    return square_root((divided_by(squares, count) - mean * mean).clamp_min(0.0)).float()


def average(rule: Averaged, peak: Tensor, tail: Tensor, count: int, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the clips, from max|g| and how many of `count` |g| exceed σ, and the share of them that is Gaussian."""
    gaussian = divided_by(tail.double(), max(count, 1)) > rule.threshold
    clip = peak
    if before is not None:
        before = before.reshape(peak.shape)
        averaged = before * rule.keep + peak * rule.add
        # If a channel was all zeros, there is no clip to average with: its next gradient counts as the first.
        clip = torch.where(gaussian | (before == 0.0), peak, averaged)
    return clip, divided_by(gaussian.sum().double(), max(gaussian.numel(), 1))


def magnitude_clips(
    rule: Averaged, x: Tensor, peak: Tensor, total: Tensor, squares: Tensor, before_one: Before, before_each: Before
) -> Clips:
    shape = (1, x.shape[1], *(1,) * (x.dim() - 2))
    each, one = sigmas(total.reshape(shape), squares.reshape(shape), x)
    return averages(rule, x, peak.reshape(shape), *tail_count_pair(x, each, one), before_one, before_each)


def gradient_pair(
    rule: Averaged,
    parts: GradientParts,
    sums: tuple[Tensor, Tensor],
    before_one: Before,
    before_each: Before,
    key: Tensor | None,
    want_one: bool,
) -> Paired:
    shape = (1, -1, *(1,) * (parts.g.dim() - 2))
    each, one = sigmas(sums[0].reshape(shape), sums[1].reshape(shape), parts.g)
    clips = averages(rule, parts.g, *normalize_grad_tails(parts, each, one), before_one, before_each)
    return paired(clips, normalize_grad_quantize_pair(parts, clips.one, clips.each, key), want_one)


def paired(clips: Clips, made: tuple[QTensor, QTensor], want_one: bool) -> Paired:
    """Returns the clips and the copies as a `Paired`."""
    one, each = made
    assert one.counts is not None and each.counts is not None
    saturated, nonfinite = each.counts.tolist()
    counted = one.counts.tolist()[0] if want_one else 0, saturated
    return Paired(clips, QTensor(*one[:2]) if want_one else None, QTensor(*each[:2]), counted, nonfinite)


def sigmas(total: Tensor, squares: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns σ of each channel, (C,), and of the whole of x, from sums (1, C, 1, ...)."""
    each = sigma(total, squares, x.numel() // max(x.shape[1], 1))
    return each.reshape(-1), sigma(sum_channels(total), sum_channels(squares), x.numel())


def averages(
    rule: Averaged, x: Tensor, peak: Tensor, tail: Tensor, tail_one: Tensor, before_one: Before, before_each: Before
) -> Clips:
    all_of_them, count = tail_one.sum(dim=1, keepdim=True), x.numel() // max(x.shape[1], 1)
    one, gaussian = average(rule, absmax(peak, -1), all_of_them, x.numel(), before_one)
    each, gaussian_each = average(rule, peak, tail, count, before_each)
    return Clips(one, each, gaussian, gaussian_each)
