# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a norm per channel: computes the coefficients of a fused pass from sums over the batch.

    forward     mean = Σx / M,  var = max(Σx²/M - mean², 0),  invstd = 1 / sqrt(var + eps)
                a = gamma·invstd,  b = beta - mean·a
    backward    with g the gradient of a·x + b:  grad_beta = Σg,  grad_gamma = (Σg·x - mean·Σg)·invstd,
                grad_x = a·(g - grad_beta/M - (x - mean)·invstd·grad_gamma/M) = a·g + q·x + r
    its sums    Σgrad_x and Σgrad_x² are computed from Σg, Σg·x, Σg² and the statistics of x, without reading grad_x

All arithmetic is float64. a, b, q, r are rounded to float32 once, b after a and r after q. Vectors have shape (C,).
"""

from __future__ import annotations

import torch
from torch import Tensor

from byteback.ops.backends.registry import backend_for
from byteback.ops.checks import check_activation, check_norm, check_optional, check_vector
from byteback.ops.types import BatchNorm, NormState, Running

_FLOAT64 = torch.float64


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
) -> NormState:
    """Returns the norm of a training step from channel_stats over `count` pixels. Updates the running mean and variance.

    `bias` is that of the convolution and not part of x: a batch norm would subtract it again, so it only shifts the running
    mean.

    >>> stats = torch.tensor([4.0]).double(), torch.tensor([10.0]).double(), torch.tensor([1.0]), torch.tensor([3.0])
    >>> made = norm_coefficients(stats, 2, None, None, None, 0.0, None, 0.1, "relu")
    >>> made.mean.item(), made.a.item(), made.b.item(), made.peak.item()
    (2.0, 1.0, -2.0, 1.0)
    """
    op, channels = "norm_coefficients", stats[0].numel()
    check_activation(op, activation)
    total, squares = (check_vector(op, n, v, channels, _FLOAT64) for n, v in zip(("total", "squares"), stats[:2], strict=True))
    low, high = (check_vector(op, n, v, channels) for n, v in zip(("low", "high"), stats[2:], strict=True))
    norm = check_norm(op, BatchNorm(gamma, beta, bias, eps, running, momentum), channels)
    vectors = norm.gamma, norm.beta, norm.bias, *(running or ())
    backend = backend_for(op, total, squares, low, high, *vectors)
    return backend.norm_coefficients((total, squares, low, high), count, norm, activation)


def norm_folded(
    mean: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns a and b of a norm with given statistics, after a convolution. Its `bias` is not part of x.

    >>> a, b = norm_folded(torch.tensor([1.0]), torch.tensor([4.0]), torch.tensor([6.0]), None, None, 0.0)
    >>> a.item(), b.item()
    (3.0, -3.0)
    """
    op, channels = "norm_folded", mean.numel()
    mean, var = check_vector(op, "mean", mean, channels), check_vector(op, "var", var, channels)
    gamma, beta = check_optional(op, "gamma", gamma, channels), check_optional(op, "beta", beta, channels)
    vectors = mean, var, gamma, beta, check_optional(op, "bias", bias, channels)
    return backend_for(op, *vectors).norm_folded(*vectors, eps)


def norm_invstd(var: Tensor, eps: float) -> Tensor:
    """Returns 1 / sqrt(var + eps) in float64 for a norm with given statistics. Sum, root and quotient are each rounded once.

    >>> norm_invstd(torch.tensor([4.0, 0.25]), 0.0).tolist()
    [0.5, 2.0]
    """
    op = "norm_invstd"
    var = check_vector(op, "var", var, var.numel())
    return backend_for(op, var).norm_invstd(var, eps)


def norm_gradient(
    a: Tensor, mean: Tensor, invstd: Tensor, total: Tensor, dot: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (q, r, grad_gamma, grad_beta) from total = Σg and dot = Σg·x over `count` pixels. Only a is float32, not float64.

    >>> one = torch.ones(1)
    >>> [v.item() for v in norm_gradient(one, one.double(), one.double(), one.double(), 3 * one.double(), 2)]
    [-1.0, 0.5, 2.0, 1.0]
    """
    op, channels = "norm_gradient", a.numel()
    a = check_vector(op, "a", a, channels)
    given = _wide(op, channels, mean=mean, invstd=invstd, total=total, dot=dot)
    return backend_for(op, a, *given).norm_gradient(a, *given, count)


def _wide(op: str, channels: int, **vectors: Tensor) -> list[Tensor]:
    """Returns float64 vectors with one number per channel, checked and dense."""
    return [check_vector(op, name, vector, channels, _FLOAT64) for name, vector in vectors.items()]


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
    """Returns Σdx and Σdx² of dx = a·g + q·x + r, from total = Σg, dot = Σg·x and squares = Σg² over `count` pixels.

    With shift = q·mean + r this is dx = a·g + q·(x - mean) + shift, where x - mean has the sum 0 and the sum of squares
    count·var. It ignores that dx is rounded to float32 and that x may be saved in a smaller dtype.

    >>> g, x, one = torch.tensor([[1.0], [5.0]]), torch.tensor([[0.0], [2.0]]), torch.ones(1)
    >>> sums = (torch.tensor([6.0]).double(), torch.tensor([10.0]).double(), torch.tensor([26.0]).double())
    >>> [s.item() for s in gradient_sums(one, -one, one, one.double(), one.double(), 0.0, *sums, 2)]
    [6.0, 20.0]
    """
    op, channels = "gradient_sums", a.numel()
    a, q, r = (check_vector(op, name, v, channels) for name, v in (("a", a), ("q", q), ("r", r)))
    wide = _wide(op, channels, mean=mean, invstd=invstd, total=total, dot=dot, squares=squares)
    return backend_for(op, a, q, r, *wide).gradient_sums(a, q, r, *wide[:2], eps, *wide[2:], count)
