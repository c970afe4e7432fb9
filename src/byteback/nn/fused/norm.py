# SPDX-License-Identifier: Apache-2.0
"""The norm of a fused block and the residual that is added after it (ops/norm.py has the formulas).

A norm that does not use batch statistics (eval, frozen) has q = r = 0. Without a norm, a = 1 and b is the bias of the
convolution. y is the product without that bias: a batch norm subtracts it again, so it only shifts the running mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback import ops
from byteback.nn.fused.sources import SHARED_RULE, floats_of, source_of
from byteback.ops.types import NormGradient, NormState


def given_state(norm: ops.BatchNorm | None, bias: Tensor | None, weight: Tensor) -> NormState:
    """Returns the state of a norm with given statistics, or without a norm. `bias` is that of the convolution."""
    a, b = given_coefficients(norm, bias, weight)
    if norm is None:
        return NormState(a, b, torch.zeros_like(a, dtype=torch.float64), torch.ones_like(a, dtype=torch.float64))
    assert norm.running is not None
    mean, var = norm.running[0].double(), norm.running[1]
    return NormState(a, b, mean if bias is None else mean - bias, ops.norm_invstd(var, norm.eps))


def given_coefficients(norm: ops.BatchNorm | None, bias: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a and b of a norm with given statistics, or without a norm."""
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
    """Returns the gradient of a norm that uses batch statistics."""
    a, b, mean, invstd, _ = state
    made = ops.normalize_grad_batch(
        g, y, a, b, mask, activation, mean, invstd, eps, want_masked=want_masked, want_sums=want_sums
    )
    # The gradient is 0 because subtracting the batch mean cancels the bias.
    return made._replace(bias=torch.zeros_like(a)) if want_bias else made


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
    """Returns the gradient of a norm with given statistics, or without a norm."""
    a, b, mean, invstd, _ = state
    seen = ops.normalize_grad_sums(g, y, a, b, mask, activation, want_masked=want_masked, want_squares=want_sums)
    total, dot = seen.total, seen.dot
    sums = None if seen.squares is None else (a * total, a.double() * a * seen.squares)
    zeros, beta = torch.zeros_like(a), total.float()
    if not has_norm:
        return NormGradient(zeros, zeros, None, None, seen.masked, sums, beta)
    gamma = ((dot - mean * total) * invstd).float()
    return NormGradient(zeros, zeros, gamma, beta, seen.masked, sums, (total * a).float())


def scaled_gradient(state: NormState) -> NormGradient:
    """Returns the gradient of a norm with given statistics if neither parameters nor a residual need a gradient."""
    zeros = torch.zeros_like(state.a)
    return NormGradient(zeros, zeros)


def residual_of(residual: Tensor | None, layer: Any) -> ops.Residual:
    """Returns what a block adds before its activation: the residual as floats, or the int8 copy that convolutions read too.

    int8 needs a source with a known clip. In training this is its own maximum. In eval it is the tracked clip of a
    convolution that has read it, because with its own maximum a prediction would depend on the batch. Otherwise the residual
    stays float.
    """
    if residual is None:
        return None
    recipe, source = layer.recipe, source_of(residual)
    if source is not None and recipe.residual_memory == "int8" and recipe.input == SHARED_RULE:
        own_clip = layer.training or recipe.eval_clip == "batch"
        _, q = source.int8() if own_clip else source.quantized[0] if source.quantized else (None, None)
        # int8 cannot represent NaN or Inf, and a residual may have no other reader that finds them.
        if q is not None and q.counts is not None and not q.counts.tolist()[1]:
            return q
    return floats_of(residual)
