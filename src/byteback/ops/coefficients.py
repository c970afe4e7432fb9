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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.addresses import flat, known, new
from byteback.ops import native
from byteback.ops.normalize_checks import Running, check_activation, check_optional, check_running, check_vector, path_for
from byteback.ops.rounded_once import divided_by, inverse, square_root

CEILINGS = {"none": math.inf, "relu": math.inf, "relu6": 6.0}
"""Activations that never decrease, with their upper end: the extremes of a channel stay its extremes."""

_library: Any = native.library
_float32, _float64 = torch.float32, torch.float64


class Coefficients(NamedTuple):
    """a, b in float32, mean and invstd in float64, each (C,); peak = max|act(a·x + b)|, 0-dim, for a monotone activation."""

    a: Tensor
    b: Tensor
    mean: Tensor
    invstd: Tensor
    peak: Tensor


def norm_coefficients(
    stats: tuple[Tensor, Tensor, Tensor, Tensor],
    count: int,
    gamma: Tensor | None,
    beta: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: Running,
    momentum: float,
    activation: str,
) -> Coefficients:
    """The norm of a training step from channel_stats over `count` pixels; moves the running statistics (mean, variance).

    `bias` is the convolution's, which x leaves out: a batch norm subtracts it again, so it only shifts the running mean.
    """
    op, channels = "norm_coefficients", stats[0].numel()
    check_activation(op, activation)
    total, squares = (check_vector(op, n, v, channels, _float64) for n, v in zip(_SUMS, stats[:2], strict=True))
    low, high = (check_vector(op, n, v, channels) for n, v in zip(("low", "high"), stats[2:], strict=True))
    gamma, beta, bias = (check_optional(op, n, v, channels) for n, v in zip(_NORM, (gamma, beta, bias), strict=True))
    writable, vectors = check_running(op, running, channels), (gamma, beta, bias, *(running or (None, None)))
    path = path_for(op, total, squares, low, high, *vectors)
    if path is None or not writable:
        return _coefficients((total, squares, low, high), count, gamma, beta, bias, eps, running, momentum, activation)
    a, b, peak = new(channels, _float32), new(channels, _float32), new((), _float32)
    mean, invstd = new(channels, _float64), new(channels, _float64)
    sums = flat(total, _float64, channels), flat(squares, _float64, channels)
    given = [flat(vector, _float32, channels) for vector in (low, high, *vectors)]
    _library.norm_coefficients(
        [channels, count, *sums, *given],
        eps,
        momentum,
        activation != "none",
        CEILINGS.get(activation, math.inf),
        [known(vector) for vector in (a, b, mean, invstd, peak)],
    )
    return Coefficients(a, b, mean, invstd, peak)


_SUMS, _NORM = ("total", "squares"), ("gamma", "beta", "bias")


def _coefficients(
    stats: tuple[Tensor, Tensor, Tensor, Tensor],
    count: int,
    gamma: Tensor | None,
    beta: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: Running,
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
    op, channels = "norm_folded", mean.numel()
    mean, var = check_vector(op, "mean", mean, channels), check_vector(op, "var", var, channels)
    gamma, beta, bias = (check_optional(op, n, v, channels) for n, v in zip(_NORM, (gamma, beta, bias), strict=True))
    vectors = (mean, var, gamma, beta, bias)
    if path_for(op, *vectors) is None:
        centre = mean.double() if bias is None else mean.double() - bias
        invstd = _invstd(var, eps)
        a = (invstd if gamma is None else gamma.double() * invstd).float()
        shift = centre * a.double()
        return a, (-shift if beta is None else beta.double() - shift).float()
    a, b = new(channels, _float32), new(channels, _float32)
    given = [flat(vector, _float32, channels) for vector in vectors]
    _library.norm_folded([channels, *given], eps, known(a), known(b))
    return a, b


def norm_invstd(var: Tensor, eps: float) -> Tensor:
    """1 / sqrt(var + eps) in float64, of a norm with given statistics: sum, root and quotient are each rounded once.

    >>> norm_invstd(torch.tensor([4.0, 0.25]), 0.0).tolist()
    [0.5, 2.0]
    """
    op, channels = "norm_invstd", var.numel()
    var = check_vector(op, "var", var, channels)
    if path_for(op, var) is None:
        return _invstd(var, eps)
    made = new((channels,), torch.float64)
    _library.norm_invstd(channels, flat(var, _float32, channels), eps, known(made))
    return made


def _invstd(var: Tensor, eps: float) -> Tensor:
    return inverse(square_root(var.double() + eps))


def norm_gradient(
    a: Tensor, mean: Tensor, invstd: Tensor, total: Tensor, dot: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, r, grad_gamma, grad_beta) from total = Σg and dot = Σg·x over `count` pixels; a is float32, the others are float64.

    >>> one = torch.ones(1)
    >>> [v.item() for v in norm_gradient(one, one.double(), one.double(), one.double(), 3 * one.double(), 2)]
    [-1.0, 0.5, 2.0, 1.0]
    """
    op, channels = "norm_gradient", a.numel()
    a = check_vector(op, "a", a, channels)
    given = _checked(op, channels, mean=mean, invstd=invstd, total=total, dot=dot)
    if path_for(op, a, *given) is None:
        mean, invstd, total, dot = given
        wide = a.double()
        gamma = (dot - mean * total) * invstd
        share = -1.0 / count if count else -math.inf
        q = (wide * invstd * gamma * share).float()
        r = (wide * total * share - q.double() * mean).float()
        return q, r, gamma.float(), total.float()
    made = new(channels, _float32), new(channels, _float32), new(channels, _float32), new(channels, _float32)
    sums = [flat(vector, _float64, channels) for vector in given]
    _library.norm_gradient([channels, count, flat(a, _float32, channels), *sums], [known(vector) for vector in made])
    return made


def _checked(op: str, channels: int, **vectors: Tensor) -> list[Tensor]:
    """Float64 vectors over the channels, dense."""
    return [check_vector(op, name, vector, channels, _float64) for name, vector in vectors.items()]


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
    op, channels = "gradient_sums", a.numel()
    a, q, r = (check_vector(op, name, v, channels) for name, v in (("a", a), ("q", q), ("r", r)))
    wide = _checked(op, channels, mean=mean, invstd=invstd, total=total, dot=dot, squares=squares)
    if path_for(op, a, q, r, *wide) is None:
        mean, invstd, total, dot, squares = wide
        a, q, r = a.double(), q.double(), r.double()
        var = (inverse(invstd * invstd) - eps).clamp_min(0.0)
        shift, centred = q * mean + r, dot - mean * total
        own = (a * a * squares + count * (q * q * var)) + count * (shift * shift)
        crossed = a * q * centred + a * shift * total
        return a * total + count * shift, own + 2.0 * crossed
    made = new(channels, _float64), new(channels, _float64)
    given = [flat(vector, _float64, channels) for vector in wide]
    factors = [flat(vector, _float32, channels) for vector in (a, q, r)]
    _library.gradient_sums([channels, count, factors[0], *given, *factors[1:]], eps, *[known(vector) for vector in made])
    return made
