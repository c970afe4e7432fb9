# SPDX-License-Identifier: Apache-2.0
"""Magnitude-aware clips: by the shape of a gradient's distribution, max|g| itself or an average of it.

    σ² = Σg²/M - (Σg/M)²                            of M numbers, in float64
    Gaussian where the share of |g| > σ exceeds a threshold
    clip = max|g| where Gaussian (or at the first time), else before · keep + max|g| · add       in float32

`magnitude_clips` answers for the whole tensor and for each channel at once, `gradient_clips` for the fused block's gradient,
whose sums are known without reading it. `float_pair` and `gradient_pair` also make the int8 copies under these clips; on
the native library the last is one call with two readings, for both tails (and max|g|) and for both copies.
`recipes/distribution_adaptive.py` says why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from byteback.ops.backends.reference.magnitude import average, averages, paired, sigma, sigmas
from byteback.ops.backends.registry import backend_for
from byteback.ops.block_grad import normalize_grad_tails
from byteback.ops.checks import check_key, check_parts, check_tensor, check_vector
from byteback.ops.programs import Averaged
from byteback.ops.quantize import quantize_pair
from byteback.ops.statistics import moments
from byteback.ops.types import Before, Clips, GradientParts, Paired, tensors_of

__all__ = ["Clips", "Paired", "average", "float_pair", "gradient_clips", "gradient_pair", "magnitude_clips", "sigma"]

_float32, _float64 = torch.float32, torch.float64


def magnitude_clips(
    rule: Averaged, x: Tensor, moments: tuple[Tensor, Tensor, Tensor], before_one: Before, before_each: Before
) -> Clips:
    """Clips of x from ops.moments(x) and those of the last time."""
    op = "magnitude_clips"
    x = check_tensor(op, "x", x)
    channels = x.shape[1]
    peak, total, squares = (
        check_vector(op, name, moment.reshape(-1), channels, dtype)
        for name, moment, dtype in zip(("peak", "total", "squares"), moments, (_float32, _float64, _float64), strict=True)
    )
    before_one, before_each = _check_before(op, before_one, before_each, channels)
    backend = backend_for(op, x, peak, total, squares, before_one, before_each)
    return backend.magnitude_clips(rule, x, peak, total, squares, before_one, before_each)


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
    each, one = sigmas(sums[0].reshape(shape), sums[1].reshape(shape), g)
    return averages(rule, g, *normalize_grad_tails(parts, each, one), before_one, before_each)


def float_pair(
    rule: Averaged, x: Tensor, before_one: Before, before_each: Before, key: Tensor | None, *, want_one: bool
) -> Paired:
    """Copies of a float tensor under its magnitude-aware clips; `want_one`: also the one under a single clip."""
    clips = magnitude_clips(rule, x, moments(x), before_one, before_each)
    return paired(clips, quantize_pair(x, clips.one, clips.each, key), want_one)


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
    backend = backend_for(op, g, *read, total, squares, before_one, before_each, key)
    return backend.gradient_pair(rule, parts, (total, squares), before_one, before_each, key, want_one)
