# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a norm per channel in plain PyTorch. ops/norm.py has the formulas.

All arithmetic is float64. a, b, q, r are rounded to float32 once, b after a and r after q. Vectors have shape (C,).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from byteback.ops.activations import TABLE
from byteback.ops.contract.rounded_once import divided_by, inverse, square_root
from byteback.ops.types import BatchNorm, NormState


@torch.no_grad()
def norm_coefficients(stats: tuple[Tensor, Tensor, Tensor, Tensor], count: int, norm: BatchNorm, activation: str) -> NormState:
    """Returns a, b, mean, invstd and peak from channel_stats. Updates the running statistics."""
    total, squares, low, high = stats
    gamma, beta, bias, eps, running, momentum = norm
    mean = divided_by(total, count)
    var = (divided_by(squares, count) - mean * mean).clamp_min_(0.0)
    if running is not None:
        seen = mean if bias is None else mean + bias
        unbiased = var * (count / (count - 1) if count > 1 else 0.0)
        for kept, now in zip(running, (seen.float(), unbiased.float()), strict=True):
            kept.mul_(1.0 - momentum).add_(now * momentum)
    invstd = norm_invstd(var, eps)
    a, b = _affine(invstd, mean, gamma, beta)
    ends = torch.stack([low, high]) * a + b
    row = TABLE[activation]
    if row.floor:
        ends.clamp_(0.0, row.ceiling)
    peak = ends.abs_().amax() if ends.numel() else ends.new_zeros(())
    return NormState(a, b, mean, invstd, peak)


def _affine(invstd: Tensor, centre: Tensor, gamma: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    a = (invstd if gamma is None else gamma.double() * invstd).float()
    shift = centre * a.double()
    return a, (-shift if beta is None else beta.double() - shift).float()


@torch.no_grad()
def norm_folded(
    mean: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns a and b of a norm with given statistics."""
    centre = mean.double() if bias is None else mean.double() - bias
    return _affine(norm_invstd(var, eps), centre, gamma, beta)


@torch.no_grad()
def norm_invstd(var: Tensor, eps: float) -> Tensor:
    """Returns 1 / sqrt(var + eps)."""
    return inverse(square_root(var.double() + eps))


@torch.no_grad()
def norm_gradient(
    a: Tensor, mean: Tensor, invstd: Tensor, total: Tensor, dot: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns q, r, grad_gamma, grad_beta."""
    wide = a.double()
    gamma = (dot - mean * total) * invstd
    share = -1.0 / count if count else -math.inf
    q = (wide * invstd * gamma * share).float()
    r = (wide * total * share - q.double() * mean).float()
    return q, r, gamma.float(), total.float()


@torch.no_grad()
def gradient_sums(
    a: Tensor,
    q: Tensor,
    r: Tensor,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
    total: Tensor,
    dot: Tensor,
    squares: Tensor,
    count: int,
) -> tuple[Tensor, Tensor]:
    """Returns Σdx and Σdx²."""
    a, q, r = a.double(), q.double(), r.double()
    var = (inverse(invstd * invstd) - eps).clamp_min(0.0)
    shift, centred = q * mean + r, dot - mean * total
    own = (a * a * squares + count * (q * q * var)) + count * (shift * shift)
    crossed = a * q * centred + a * shift * total
    return a * total + count * shift, own + 2.0 * crossed
