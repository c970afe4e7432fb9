# SPDX-License-Identifier: Apache-2.0
"""The norm of a fused block: which statistics it uses, and what follows for the passes around it (ops/norm.py).

A norm that does not use the batch's statistics (eval, frozen) has q = r = 0; without a norm a = 1 and b is the convolution's
bias. y is the product without that bias: a batch norm subtracts it again, so it only shifts the running mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from byteback import ops
from byteback.nn.pending import Norm


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


def of_batch(norm: Norm, bias: Tensor | None) -> ops.BatchNorm:
    """A norm that uses its batch, and moves its running statistics if it has them."""
    running = None
    if norm.running_mean is not None and norm.running_var is not None:
        running = norm.running_mean, norm.running_var
    return ops.BatchNorm(norm.weight, norm.bias, bias, norm.eps, running, norm.momentum)


def folded(norm: Norm | None, bias: Tensor | None, weight: Tensor) -> Normalized:
    """A norm with given statistics, or none at all."""
    a, b = given_coefficients(norm, bias, weight)
    if norm is None:
        return Normalized(a, b, torch.zeros_like(a, dtype=torch.float64), torch.ones_like(a, dtype=torch.float64))
    assert norm.running_mean is not None and norm.running_var is not None
    mean = norm.running_mean.double()
    return Normalized(a, b, mean if bias is None else mean - bias, ops.norm_invstd(norm.running_var, norm.eps))


def given_coefficients(norm: Norm | None, bias: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """a and b of a norm with given statistics, or of none at all."""
    if norm is None:
        channels = weight.shape[0]
        return weight.new_ones(channels), weight.new_zeros(channels) if bias is None else bias.detach()
    assert norm.running_mean is not None and norm.running_var is not None
    return ops.norm_folded(norm.running_mean, norm.running_var, norm.weight, norm.bias, bias, norm.eps)


def input_gradient(normalized: Normalized, training: bool | None, total: Tensor | None, dot: Tensor | None) -> InputGradient:
    """From the sums Σg' and Σg'y to grad_y's coefficients and the parameters' gradients, for a norm that is not the batch's.

    `training` is the norm's: False for given statistics, None without a norm.
    """
    a, _, mean, invstd = normalized
    zeros = torch.zeros_like(a)
    if total is None or dot is None:
        return InputGradient(a, zeros, zeros, None, None, None)
    beta = total.float()
    if training is None:
        return InputGradient(a, zeros, zeros, None, None, beta)
    gamma = ((dot - mean * total) * invstd).float()
    return InputGradient(a, zeros, zeros, gamma, beta, (total * a).float())
