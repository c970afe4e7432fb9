# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a norm per channel in the native library.

All native paths use the same code. With PyTorch calls it would take longer than a pass over a small layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback.ops.activations import TABLE
from byteback.ops.backends import reference
from byteback.ops.backends.cpu import library
from byteback.ops.backends.cpu.addresses import flat, known, new
from byteback.ops.types import BatchNorm, NormState, Running

_native: Any = library.native
_FLOAT32, _FLOAT64 = torch.float32, torch.float64


def is_writable(running: Running) -> bool:
    """Whether a kernel can write to the running statistics. They are written to in place, so they are not copied."""
    return running is None or (running[0].is_contiguous() and running[1].is_contiguous())


def norm_coefficients(
    path: int, stats: tuple[Tensor, Tensor, Tensor, Tensor], count: int, norm: BatchNorm, activation: str
) -> NormState:
    if not is_writable(norm.running):
        return reference.norm_coefficients(stats, count, norm, activation)
    total, squares, low, high = stats
    channels, row, (running_mean, running_var) = total.numel(), TABLE[activation], norm.running or (None, None)
    a, b, peak = new(channels, _FLOAT32), new(channels, _FLOAT32), new((), _FLOAT32)
    mean, invstd = new(channels, _FLOAT64), new(channels, _FLOAT64)
    _native.norm_coefficients(
        channels=channels,
        count=count,
        eps=norm.eps,
        momentum=norm.momentum,
        floor=row.floor,
        ceiling=row.ceiling,
        total=flat(total, _FLOAT64, channels),
        squares=flat(squares, _FLOAT64, channels),
        low=flat(low, _FLOAT32, channels),
        high=flat(high, _FLOAT32, channels),
        gamma=flat(norm.gamma, _FLOAT32, channels),
        beta=flat(norm.beta, _FLOAT32, channels),
        bias=flat(norm.bias, _FLOAT32, channels),
        running_mean=flat(running_mean, _FLOAT32, channels),
        running_var=flat(running_var, _FLOAT32, channels),
        a=known(a),
        b=known(b),
        mean=known(mean),
        invstd=known(invstd),
        peak=known(peak),
    )
    return NormState(a, b, mean, invstd, peak)


def norm_folded(
    path: int, mean: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    channels = mean.numel()
    a, b = new(channels, _FLOAT32), new(channels, _FLOAT32)
    _native.norm_folded(
        channels=channels,
        eps=eps,
        mean=flat(mean, _FLOAT32, channels),
        var=flat(var, _FLOAT32, channels),
        gamma=flat(gamma, _FLOAT32, channels),
        beta=flat(beta, _FLOAT32, channels),
        bias=flat(bias, _FLOAT32, channels),
        a=known(a),
        b=known(b),
    )
    return a, b


def norm_invstd(path: int, var: Tensor, eps: float) -> Tensor:
    channels = var.numel()
    invstd = new(channels, _FLOAT64)
    _native.norm_invstd(channels=channels, eps=eps, var=flat(var, _FLOAT32, channels), invstd=known(invstd))
    return invstd


def norm_gradient(
    path: int, a: Tensor, mean: Tensor, invstd: Tensor, total: Tensor, dot: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    channels = a.numel()
    q, r, gamma, beta = new(channels, _FLOAT32), new(channels, _FLOAT32), new(channels, _FLOAT32), new(channels, _FLOAT32)
    _native.norm_gradient(
        channels=channels,
        count=count,
        a=flat(a, _FLOAT32, channels),
        mean=flat(mean, _FLOAT64, channels),
        invstd=flat(invstd, _FLOAT64, channels),
        total=flat(total, _FLOAT64, channels),
        dot=flat(dot, _FLOAT64, channels),
        q=known(q),
        r=known(r),
        grad_gamma=known(gamma),
        grad_beta=known(beta),
    )
    return q, r, gamma, beta


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
    dx_total, dx_squares = new(channels, _FLOAT64), new(channels, _FLOAT64)
    _native.gradient_sums(
        channels=channels,
        count=count,
        eps=eps,
        a=flat(a, _FLOAT32, channels),
        q=flat(q, _FLOAT32, channels),
        r=flat(r, _FLOAT32, channels),
        mean=flat(mean, _FLOAT64, channels),
        invstd=flat(invstd, _FLOAT64, channels),
        total=flat(total, _FLOAT64, channels),
        dot=flat(dot, _FLOAT64, channels),
        squares=flat(squares, _FLOAT64, channels),
        dx_total=known(dx_total),
        dx_squares=known(dx_squares),
    )
    return dx_total, dx_squares
