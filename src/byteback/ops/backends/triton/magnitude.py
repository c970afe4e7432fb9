# SPDX-License-Identifier: Apache-2.0
"""Magnitude-aware clips on a GPU: the passes are kernels, the few numbers per channel are PyTorch. Nothing is read."""

from __future__ import annotations

from torch import Tensor

from byteback.ops.backends.reference.magnitude import averages, sigmas
from byteback.ops.backends.triton.block_grad import normalize_grad_quantize_pair, normalize_grad_tails
from byteback.ops.backends.triton.statistics import tail_count_pair
from byteback.ops.programs import Averaged
from byteback.ops.types import Before, Clips, GradientParts, Paired


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
    packs: bool = False,
) -> Paired:
    """Returns both copies. `saturated` and `nonfinite` are numbers in device memory."""
    clips = gradient_clips(rule, parts, sums, before_one, before_each)
    first, second = normalize_grad_quantize_pair(parts, clips.one, clips.each, key, packs)
    assert first.counts is not None and second.counts is not None
    saturated = first.counts[0], second.counts[0]
    return Paired(clips, first if want_one else None, second, saturated, second.counts[1])  # type: ignore[arg-type]


def gradient_clips(
    rule: Averaged, parts: GradientParts, sums: tuple[Tensor, Tensor], before_one: Before, before_each: Before
) -> Clips:
    shape = (1, -1, *(1,) * (parts.g.dim() - 2))
    each, one = sigmas(sums[0].reshape(shape), sums[1].reshape(shape), parts.g)
    return averages(rule, parts.g, *normalize_grad_tails(parts, each, one), before_one, before_each)
