# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a norm per channel on a GPU: one kernel for the coefficients, PyTorch for the gradient's few numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from byteback.ops.activations import TABLE
from byteback.ops.backends import reference
from byteback.ops.backends.triton.constants import float64
from byteback.ops.backends.triton.kernels import norm as kernels
from byteback.ops.backends.triton.launch import blocks, launch
from byteback.ops.types import BatchNorm, NormState

gradient_sums = reference.gradient_sums
norm_folded = reference.norm_folded
norm_gradient = reference.norm_gradient
norm_invstd = reference.norm_invstd

_BC = 128


@torch.no_grad()
def norm_coefficients(stats: tuple[Tensor, Tensor, Tensor, Tensor], count: int, norm: BatchNorm, activation: str) -> NormState:
    total, squares, low, high = stats
    gamma, beta, bias, eps, running, momentum = norm
    given = [None if part is None else part.contiguous() for part in (gamma, beta, bias)]
    kept = [total, total] if running is None else list(running)
    if not total.numel() or not all(part.is_contiguous() for part in kept):
        return reference.norm_coefficients(stats, count, norm, activation)
    c, device = total.numel(), total.device
    a, b = torch.empty_like(low), torch.empty_like(low)
    mean, invstd = torch.empty_like(total), torch.empty_like(total)
    peak = torch.zeros((), dtype=torch.int32, device=device)
    launch(
        kernels.coefficients,
        (blocks(c, _BC),),
        *(part.contiguous() for part in stats),
        *(low if part is None else part for part in given),
        *(*kept, float64(eps, device), a, b, mean, invstd, peak),
        *(float64(count, device), float64(count / (count - 1) if count > 1 else 0.0, device)),
        *(1.0 - momentum, momentum, c),
        GAMMA=gamma is not None,
        BETA=beta is not None,
        BIAS=bias is not None,
        RUNNING=running is not None,
        ACT=TABLE[activation].number,
        BC=_BC,
    )
    return NormState(a, b, mean, invstd, peak.view(torch.float32))
