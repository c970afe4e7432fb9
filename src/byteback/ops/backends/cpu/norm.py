# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a norm per channel on the native library.

One version for every native path; as PyTorch calls it would take longer than the pass over a small layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback.ops.activations import TABLE
from byteback.ops.backends import reference
from byteback.ops.backends.cpu import library
from byteback.ops.backends.cpu.addresses import flat, known, new
from byteback.ops.types import BatchNorm, Coefficients, Running

_native: Any = library.native
_FLOAT32, _FLOAT64 = torch.float32, torch.float64


def is_writable(running: Running) -> bool:
    """Whether a kernel can write to the running statistics, which are never copied."""
    return running is None or (running[0].is_contiguous() and running[1].is_contiguous())


def vectors_of(norm: BatchNorm) -> tuple[Tensor | None, ...]:
    """gamma, beta, bias, running mean and variance."""
    return norm.gamma, norm.beta, norm.bias, *(norm.running or (None, None))


def norm_coefficients(
    path: int, stats: tuple[Tensor, Tensor, Tensor, Tensor], count: int, norm: BatchNorm, activation: str
) -> Coefficients:
    if not is_writable(norm.running):
        return reference.norm_coefficients(stats, count, norm, activation)
    total, squares, low, high = stats
    channels, row, vectors = total.numel(), TABLE[activation], vectors_of(norm)
    a, b, peak = new(channels, _FLOAT32), new(channels, _FLOAT32), new((), _FLOAT32)
    mean, invstd = new(channels, _FLOAT64), new(channels, _FLOAT64)
    sums = flat(total, _FLOAT64, channels), flat(squares, _FLOAT64, channels)
    given = [flat(vector, _FLOAT32, channels) for vector in (low, high, *vectors)]
    _native.norm_coefficients(
        [channels, count, *sums, *given],
        norm.eps,
        norm.momentum,
        row.floor,
        row.ceiling,
        [known(vector) for vector in (a, b, mean, invstd, peak)],
    )
    return Coefficients(a, b, mean, invstd, peak)


def norm_folded(
    path: int, mean: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    channels = mean.numel()
    a, b = new(channels, _FLOAT32), new(channels, _FLOAT32)
    given = [flat(vector, _FLOAT32, channels) for vector in (mean, var, gamma, beta, bias)]
    _native.norm_folded([channels, *given], eps, known(a), known(b))
    return a, b


def norm_invstd(path: int, var: Tensor, eps: float) -> Tensor:
    channels = var.numel()
    made = new(channels, _FLOAT64)
    _native.norm_invstd(channels, flat(var, _FLOAT32, channels), eps, known(made))
    return made


def norm_gradient(
    path: int, a: Tensor, mean: Tensor, invstd: Tensor, total: Tensor, dot: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    channels = a.numel()
    made = new(channels, _FLOAT32), new(channels, _FLOAT32), new(channels, _FLOAT32), new(channels, _FLOAT32)
    sums = [flat(vector, _FLOAT64, channels) for vector in (mean, invstd, total, dot)]
    _native.norm_gradient([channels, count, flat(a, _FLOAT32, channels), *sums], [known(vector) for vector in made])
    return made


def gradient_sums(
    path: int,
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
    channels = a.numel()
    made = new(channels, _FLOAT64), new(channels, _FLOAT64)
    given = [flat(vector, _FLOAT64, channels) for vector in (mean, invstd, total, dot, squares)]
    factors = [flat(vector, _FLOAT32, channels) for vector in (a, q, r)]
    _native.gradient_sums([channels, count, factors[0], *given, *factors[1:]], eps, *[known(vector) for vector in made])
    return made
