# SPDX-License-Identifier: Apache-2.0
"""The norm of a fused block and the residual that is added after it (ops/norm.py has the formulas).

A norm that does not use the batch's statistics (eval, frozen) has q = r = 0; without a norm a = 1 and b is the convolution's
bias. y is the product without that bias: a batch norm subtracts it again, so it only shifts the running mean.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback import ops
from byteback.nn.fused.sources import SHARED_RULE, channels_last, materialize, source_of


class NormState(NamedTuple):
    """a, b in float32; mean and invstd in float64 (0 and 1 without a norm). Each (C,)."""

    a: Tensor
    b: Tensor
    mean: Tensor
    invstd: Tensor


class NormGradient(NamedTuple):
    """grad_y = p·g' + q·y + r, where g' is g through the activation's derivative, and the parameters' gradients, (C,) each.

    `masked` is g' itself, `sums` are Σgrad_y and Σgrad_y² of each channel; None where they were not asked for.
    """

    p: Tensor
    q: Tensor
    r: Tensor
    gamma: Tensor | None = None
    beta: Tensor | None = None
    bias: Tensor | None = None
    masked: Tensor | None = None
    sums: tuple[Tensor, Tensor] | None = None


def given_state(norm: ops.BatchNorm | None, bias: Tensor | None, weight: Tensor) -> NormState:
    """A norm with given statistics, or none at all. `bias` is the convolution's."""
    a, b = given_coefficients(norm, bias, weight)
    if norm is None:
        return NormState(a, b, torch.zeros_like(a, dtype=torch.float64), torch.ones_like(a, dtype=torch.float64))
    assert norm.running is not None
    mean, var = norm.running[0].double(), norm.running[1]
    return NormState(a, b, mean if bias is None else mean - bias, ops.norm_invstd(var, norm.eps))


def given_coefficients(norm: ops.BatchNorm | None, bias: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """a and b of a norm with given statistics, or of none at all."""
    if norm is None:
        channels = weight.shape[0]
        return weight.new_ones(channels), weight.new_zeros(channels) if bias is None else bias.detach()
    assert norm.running is not None
    return ops.norm_folded(*norm.running, norm.gamma, norm.beta, bias, norm.eps)


def batch_gradient(
    g: Tensor,
    y: Any,  # as it was kept
    state: NormState,
    mask: Tensor | None,
    activation: str,
    eps: float,
    *,
    want_bias: bool,
    want_masked: bool,
    want_sums: bool,
) -> NormGradient:
    """The gradient of a norm that uses its batch's statistics."""
    a, b, mean, invstd = state
    q, r, gamma, beta, masked, sums = ops.normalize_grad_batch(
        g, y, a, b, mask, activation, mean, invstd, eps, want_masked=want_masked, want_sums=want_sums
    )
    # The batch's mean subtracts the bias again.
    return NormGradient(a, q, r, gamma, beta, torch.zeros_like(a) if want_bias else None, masked, sums)


def given_gradient(
    g: Tensor,
    y: Any,  # as it was kept
    state: NormState,
    mask: Tensor | None,
    activation: str,
    *,
    has_norm: bool,
    want_masked: bool,
    want_sums: bool,
) -> NormGradient:
    """The gradient of a norm with given statistics, or without a norm."""
    a, b, mean, invstd = state
    seen = ops.normalize_grad_sums(g, y, a, b, mask, activation, want_masked=want_masked, want_squares=want_sums)
    total, dot = seen.total, seen.dot
    sums = None if seen.squares is None else (a * total, a.double() * a * seen.squares)
    zeros, beta = torch.zeros_like(a), total.float()
    if not has_norm:
        return NormGradient(a, zeros, zeros, None, None, beta, seen.masked, sums)
    gamma = ((dot - mean * total) * invstd).float()
    return NormGradient(a, zeros, zeros, gamma, beta, (total * a).float(), seen.masked, sums)


def scaled_gradient(state: NormState) -> NormGradient:
    """The gradient of a norm with given statistics, where neither parameters nor a residual need one."""
    zeros = torch.zeros_like(state.a)
    return NormGradient(state.a, zeros, zeros)


def residual_of(residual: Tensor | None, layer: Any) -> ops.Residual:
    """What a block adds before its activation: the residual as floats, or as the int8 copy that its convolutions read anyway.

    int8 needs a source that can be quantized by a known clip: in training its own maximum; in eval the tracked clip of a
    convolution that has read it, as its own maximum would make a prediction depend on its batch. Else it stays float.
    """
    if residual is None:
        return None
    recipe = layer.recipe
    source = source_of(residual) if recipe.residual_memory == "int8" and recipe.input == SHARED_RULE else None
    if source is not None:
        own_clip = layer.training or recipe.eval_clip == "batch"
        copy = source.int8() if own_clip else source.quantized[0] if source.quantized else None
        # Integers cannot show NaN or Inf, and a shortcut may have no other reader that would find them.
        if copy is not None and not copy.counts.tolist()[1]:
            return copy.q.values, copy.q.scale
    return channels_last(materialize(residual))
