# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a norm, per channel: from sums over the batch to the numbers that a fused pass multiplies and adds.

    forward     mean = Σx / M,  var = max(Σx²/M - mean², 0),  invstd = 1 / sqrt(var + eps)
                a = gamma·invstd,  b = beta - mean·a
    backward    with g the gradient of a·x + b:  grad_beta = Σg,  grad_gamma = (Σg·x - mean·Σg)·invstd,
                grad_x = a·(g - grad_beta/M - (x - mean)·invstd·grad_gamma/M) = a·g + q·x + r
    its spread  Σgrad_x and Σgrad_x² follow from Σg, Σg·x, Σg² and the statistics of x: no reading of grad_x is needed

All of it in float64; a, b, q, r are rounded to float32 once, b after a and r after q. One native version serves every
native path; as PyTorch calls it would take longer than the pass over a small layer. Vectors are (C,), dense.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.ops import native
from byteback.ops.rounded_once import divided_by, inverse, square_root

CEILINGS = {"none": math.inf, "relu": math.inf, "relu6": 6.0}
"""Activations that never decrease, with their upper end: the extremes of a channel stay its extremes."""

_library: Any = native.library


class Coefficients(NamedTuple):
    """a, b in float32, mean and invstd in float64, each (C,); peak = max|act(a·x + b)|, 0-dim, for a monotone activation."""

    a: Tensor
    b: Tensor
    mean: Tensor
    invstd: Tensor
    peak: Tensor


def are_plain(vectors: Iterable[Tensor | None], channels: int) -> bool:
    """Whether the native library can read each as `channels` floats; PyTorch, which takes the others, says what is wrong."""
    return all(
        v is None or (v.is_cpu and v.dtype is torch.float32 and v.numel() == channels and v.is_contiguous()) for v in vectors
    )


def norm_coefficients(
    stats: tuple[Tensor, Tensor, Tensor, Tensor],
    count: int,
    gamma: Tensor | None,
    beta: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
    activation: str,
) -> Coefficients:
    """The norm of a training step from channel_stats over `count` pixels; moves the running statistics (mean, variance).

    `bias` is the convolution's, which x leaves out: a batch norm subtracts it again, so it only shifts the running mean.
    """
    total, squares, low, high = stats
    channels = total.shape[0]
    plain = are_plain((gamma, beta, bias, *(running or ())), channels)
    if native.number() is None or not plain or not total.is_cpu:
        return _coefficients(stats, count, gamma, beta, bias, eps, running, momentum, activation)
    a, b = torch.empty(channels, dtype=torch.float32), torch.empty(channels, dtype=torch.float32)
    mean, invstd = torch.empty(channels, dtype=torch.float64), torch.empty(channels, dtype=torch.float64)
    peak = torch.empty((), dtype=torch.float32)
    addresses = [0 if vector is None else vector.data_ptr() for vector in (gamma, beta, bias, *(running or (None, None)))]
    _library.norm_coefficients(
        [channels, count, total.data_ptr(), squares.data_ptr(), low.data_ptr(), high.data_ptr(), *addresses],
        eps,
        momentum,
        activation != "none",
        CEILINGS.get(activation, math.inf),
        [a.data_ptr(), b.data_ptr(), mean.data_ptr(), invstd.data_ptr(), peak.data_ptr()],
    )
    return Coefficients(a, b, mean, invstd, peak)


def _coefficients(
    stats: tuple[Tensor, Tensor, Tensor, Tensor],
    count: int,
    gamma: Tensor | None,
    beta: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
    activation: str,
) -> Coefficients:
    total, squares, low, high = stats
    mean = divided_by(total, count)
    var = (divided_by(squares, count) - mean * mean).clamp_min_(0.0)
    if running is not None:
        seen = mean if bias is None else mean + bias
        unbiased = var * (count / (count - 1) if count > 1 else 0.0)
        for kept, now in zip(running, (seen.float(), unbiased.float()), strict=True):
            kept.mul_(1.0 - momentum).add_(now * momentum)
    invstd = _invstd(var, eps)
    a = (invstd if gamma is None else gamma.double() * invstd).float()
    shift = mean * a.double()
    b = (-shift if beta is None else beta.double() - shift).float()
    ends = torch.stack([low, high]) * a + b
    if activation != "none":
        ends.clamp_(0.0, CEILINGS.get(activation, math.inf))
    peak = ends.abs_().amax() if ends.numel() else ends.new_zeros(())
    return Coefficients(a, b, mean, invstd, peak)


def norm_folded(
    mean: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """a and b of a norm with given statistics, after a convolution whose `bias` x leaves out.

    >>> a, b = norm_folded(torch.tensor([1.0]), torch.tensor([4.0]), torch.tensor([6.0]), None, None, 0.0)
    >>> a.item(), b.item()
    (3.0, -3.0)
    """
    vectors = (mean, var, gamma, beta, bias)
    channels = mean.shape[0]
    if native.number() is None or not are_plain(vectors, channels):
        centre = mean.double() if bias is None else mean.double() - bias
        invstd = _invstd(var, eps)
        a = (invstd if gamma is None else gamma.double() * invstd).float()
        shift = centre * a.double()
        return a, (-shift if beta is None else beta.double() - shift).float()
    a, b = torch.empty(channels, dtype=torch.float32), torch.empty(channels, dtype=torch.float32)
    addresses = [0 if vector is None else vector.data_ptr() for vector in vectors]
    _library.norm_folded([channels, *addresses], eps, a.data_ptr(), b.data_ptr())
    return a, b


def norm_invstd(var: Tensor, eps: float) -> Tensor:
    """1 / sqrt(var + eps) in float64, of a norm with given statistics: sum, root and quotient are each rounded once.

    >>> norm_invstd(torch.tensor([4.0, 0.25]), 0.0).tolist()
    [0.5, 2.0]
    """
    if native.number() is None or not are_plain((var,), var.numel()):
        return _invstd(var, eps)
    made = torch.empty(var.shape, dtype=torch.float64)
    _library.norm_invstd(var.numel(), var.data_ptr(), eps, made.data_ptr())
    return made


def _invstd(var: Tensor, eps: float) -> Tensor:
    return inverse(square_root(var.double() + eps))


def norm_gradient(
    a: Tensor, mean: Tensor, invstd: Tensor, total: Tensor, dot: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, r, grad_gamma, grad_beta) from total = Σg and dot = Σg·x over `count` pixels."""
    if native.number() is None or not a.is_cpu:
        wide = a.double()
        gamma = (dot - mean * total) * invstd
        q = (wide * invstd * gamma * (-1.0 / count)).float()
        r = (wide * total * (-1.0 / count) - q.double() * mean).float()
        return q, r, gamma.float(), total.float()
    channels = a.shape[0]
    made = tuple(torch.empty(channels, dtype=torch.float32) for _ in range(4))
    given = (a, mean, invstd, total, dot)
    _library.norm_gradient([channels, count, *(t.data_ptr() for t in given)], [t.data_ptr() for t in made])
    return made  # type: ignore[return-value]


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
    """Σdx and Σdx² of dx = a·g + q·x + r, from total = Σg, dot = Σg·x and squares = Σg² over `count` pixels.

    With shift = q·mean + r it is dx = a·g + q·(x - mean) + shift, where x - mean has the sum 0 and the sum of squares
    count·var. That leaves out how dx is rounded to float32, and that x may be kept as something smaller.

    >>> g, x, one = torch.tensor([[1.0], [5.0]]), torch.tensor([[0.0], [2.0]]), torch.ones(1)
    >>> sums = (torch.tensor([6.0]).double(), torch.tensor([10.0]).double(), torch.tensor([26.0]).double())
    >>> [s.item() for s in gradient_sums(one, -one, one, one.double(), one.double(), 0.0, *sums, 2)]
    [6.0, 20.0]
    """
    if native.number() is None or not a.is_cpu:
        a, q, r = a.double(), q.double(), r.double()
        var = (inverse(invstd * invstd) - eps).clamp_min(0.0)
        shift, centred = q * mean + r, dot - mean * total
        own = (a * a * squares + count * (q * q * var)) + count * (shift * shift)
        crossed = a * q * centred + a * shift * total
        return a * total + count * shift, own + 2.0 * crossed
    made = torch.empty_like(total), torch.empty_like(total)
    given = (a, mean, invstd, total, dot, squares, q, r)
    _library.gradient_sums([a.shape[0], count, *(t.data_ptr() for t in given)], eps, *(t.data_ptr() for t in made))
    return made
