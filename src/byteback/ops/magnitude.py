# SPDX-License-Identifier: Apache-2.0
"""Magnitude-aware clips: max|g| or a moving average of it, depending on the distribution of the gradient.

    σ² = Σg²/M - (Σg/M)²                            of M numbers, in float64
    Gaussian if the share of |g| > σ exceeds a threshold
    clip = max|g| if Gaussian (or in the first step), else before · keep + max|g| · add       in float32

`magnitude_clips` returns the clips of the whole tensor and of each channel. `gradient_clips` does so for the gradient of a
fused block, whose sums are known without reading it. `float_pair` and `gradient_pair` also compute the int8 copies with these
clips. In the native library `gradient_pair` is one call that reads twice: for both tails (and max|g|) and for both copies.
`recipes/distribution_adaptive.py` explains the method.
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
    """Returns the clips of x from ops.moments(x) and the clips of the previous step."""
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
    """Returns the clips of the previous step as dense vectors, checked."""
    return (
        None if one is None else check_vector(op, "before_one", one.reshape(-1), 1),
        None if each is None else check_vector(op, "before_each", each.reshape(-1), channels),
    )


def gradient_clips(
    rule: Averaged, parts: GradientParts, sums: tuple[Tensor, Tensor], before_one: Before, before_each: Before
) -> Clips:
    """Returns the clips of the dx of normalize_grad, which is not stored, from Σdx and Σdx² of each channel, (C,)."""
    g = parts.g
    shape = (1, -1, *(1,) * (g.dim() - 2))
    each, one = sigmas(sums[0].reshape(shape), sums[1].reshape(shape), g)
    return averages(rule, g, *normalize_grad_tails(parts, each, one), before_one, before_each)


def float_pair(
    rule: Averaged, x: Tensor, before_one: Before, before_each: Before, key: Tensor | None, *, want_one: bool
) -> Paired:
    """Returns int8 copies of a float tensor with its magnitude-aware clips. The copy with one clip is made if `want_one`."""
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
    """Returns `float_pair` of the dx of normalize_grad, which is not stored, from Σdx and Σdx² of each channel, (C,)."""
    op = "gradient_pair"
    parts, key = check_parts(op, parts), check_key(op, key)
    g = parts.g
    channels = g.shape[1]
    total, squares = (check_vector(op, n, v, channels, _float64) for n, v in zip(("total", "squares"), sums, strict=True))
    before_one, before_each = _check_before(op, before_one, before_each, channels)
    read = (*tensors_of(parts.x), parts.a, parts.b, parts.mask, parts.p, parts.q, parts.r)
    backend = backend_for(op, g, *read, total, squares, before_one, before_each, key)
    return backend.gradient_pair(rule, parts, (total, squares), before_one, before_each, key, want_one)
