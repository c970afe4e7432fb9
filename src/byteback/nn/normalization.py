# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a norm, per channel: from sums over the batch to the numbers that a fused pass multiplies and adds.

    forward     mean = Σy / M,  var = Σy²/M - mean²,  invstd = 1 / sqrt(var + eps),  a = gamma·invstd,  b = beta - mean·a
    backward    with g' the gradient of a·y + b:  grad_beta = Σg',  grad_gamma = (Σg'y - mean·Σg')·invstd,
                grad_y = a·(g' - grad_beta/M - (y - mean)·invstd·grad_gamma/M) = p·g' + q·y + r

All of it in float64; a, b, p, q, r are rounded to float32 once, b and r after a and p, q were rounded. A norm that does not
use the batch's statistics (eval, frozen) has q = r = 0; without a norm a = 1 and b is the convolution's bias.

y is the product without the convolution's bias: a batch norm subtracts it again, so it only shifts the running mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from byteback import ops
from byteback.nn.pending import Norm

MONOTONE = ("none", "relu", "relu6")
"""Activations that never decrease: the extremes of a channel stay its extremes."""


class Normalized(NamedTuple):
    """a, b in float32; mean and invstd in float64 (0 and 1 without a norm). Each (C,)."""

    a: Tensor
    b: Tensor
    mean: Tensor
    invstd: Tensor


class InputGradient(NamedTuple):
    """grad_y = p·g' + q·y + r, and the gradients of the parameters, (C,) each."""

    p: Tensor
    q: Tensor
    r: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    bias: Tensor | None


def from_batch(y: Tensor, norm: Norm, bias: Tensor | None) -> tuple[Normalized, Tensor, Tensor]:
    """The norm of a training step, and the extremes of each channel of y. Moves the running statistics."""
    total, squares, low, high = ops.channel_stats(y)
    count = y.numel() // y.shape[1]
    mean = total / count
    var = (squares / count - mean * mean).clamp_min_(0.0)
    if norm.running_mean is not None and norm.running_var is not None:
        seen = mean if bias is None else mean + bias
        norm.running_mean.mul_(1.0 - norm.momentum).add_(seen.float(), alpha=norm.momentum)
        norm.running_var.mul_(1.0 - norm.momentum).add_((var * (count / (count - 1))).float(), alpha=norm.momentum)
    return _normalized(mean, (var + norm.eps).rsqrt_(), norm), low, high


def folded(norm: Norm | None, bias: Tensor | None, weight: Tensor) -> Normalized:
    """A norm with given statistics, or none at all."""
    channels = weight.shape[0]
    if norm is None:
        zeros, ones = weight.new_zeros(channels, dtype=torch.float64), weight.new_ones(channels, dtype=torch.float64)
        return Normalized(ones.float(), zeros.float() if bias is None else bias.detach(), zeros, ones)
    assert norm.running_mean is not None and norm.running_var is not None
    mean = norm.running_mean.double()
    mean = mean if bias is None else mean - bias
    return _normalized(mean, (norm.running_var.double() + norm.eps).rsqrt_(), norm)


def _normalized(mean: Tensor, invstd: Tensor, norm: Norm) -> Normalized:
    a = (invstd if norm.weight is None else norm.weight.double().mul_(invstd)).float()
    shift = mean * a
    b = (shift.neg_() if norm.bias is None else norm.bias - shift).float()
    return Normalized(a, b, mean, invstd)


def known_peak(normalized: Normalized, low: Tensor, high: Tensor, activation: str) -> Tensor:
    """max|act(a·y + b)| from the extremes of each channel, by the very operations of the pass that will write it."""
    ends = torch.stack([low, high]) * normalized.a + normalized.b
    if activation != "none":
        ends.clamp_(0.0, 6.0 if activation == "relu6" else None)
    return ends.abs_().amax()


def input_gradient(
    normalized: Normalized, training: bool | None, total: Tensor | None, dot: Tensor | None, count: int
) -> InputGradient:
    """From the sums Σg' and Σg'y over `count` pixels to grad_y's coefficients and the parameters' gradients.

    `training` is the norm's: True for the batch's statistics, False for given ones, None without a norm.
    """
    a, _, mean, invstd = normalized
    zeros = torch.zeros_like(a)
    if total is None or dot is None:
        return InputGradient(a, zeros, zeros, None, None, None)
    beta = total.float()
    if training is None:
        return InputGradient(a, zeros, zeros, None, None, beta)
    gamma = (dot - mean * total).mul_(invstd)
    if not training:
        return InputGradient(a, zeros, zeros, gamma.float(), beta, (total * a).float())
    wide = a.double()
    q = (wide * invstd * gamma).mul_(-1.0 / count).float()
    r = (wide * total).mul_(-1.0 / count).sub_(q * mean).float()
    return InputGradient(a, q, r, gamma.float(), beta, zeros)
