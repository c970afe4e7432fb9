# SPDX-License-Identifier: Apache-2.0
"""The fused block's passes back: from the gradient of its result to that of the convolution's output, as floats or as int8.

Two passes over (g, x): the sums that BatchNorm's gradient takes (`batch.py` and `coefficients.py` make p, q and r of them),
then dx = (p·gm + q·x) + r itself. The legend is normalize.py's; g is float32 (N, C, ...), x BatchNorm's input as it was kept,
p, q, r are float32 vectors (C,). `pairs.py` has what two int8 copies of dx need.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from byteback.ops import normalize_native as kernels
from byteback.ops import normalize_reference as plain
from byteback.ops import reference
from byteback.ops.normalize_checks import (
    check_gate,
    check_kept,
    check_key,
    check_one,
    check_parts,
    check_tensor,
    path_for,
    path_of_parts,
    tensors_of,
)
from byteback.ops.normalize_reference import GradientParts, Kept

__all__ = ["GradientParts", "GradSums", "normalize_grad_sums", "normalize_grad", "normalize_grad_quantize"]


class GradSums(NamedTuple):
    """Σgm, Σ gm·x and Σgm² per channel (float64, defined bits), and gm itself; the last two None where not asked for."""

    total: Tensor
    dot: Tensor
    squares: Tensor | None
    masked: Tensor | None


def normalize_grad_sums(
    g: Tensor,
    x: Kept,
    a: Tensor | None,
    b: Tensor | None,
    mask: Tensor | None,
    activation: str,
    *,
    want_masked: bool,
    want_squares: bool = False,
) -> GradSums:
    """What the gradient of the norm takes from each channel, and gm: the gradient of the residual branch.

    gm = g · activation'(z). For none, relu and relu6 it is g or 0 by the mask if there is one, else by z; hardswish and silu
    always take z = a·x + b. `none` without a mask needs neither a nor b.

    >>> g, x = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [-1.0]])
    >>> sums = normalize_grad_sums(g, x, torch.ones(1), torch.zeros(1), None, "relu", want_masked=True)
    >>> sums.total.item(), sums.dot.item(), sums.masked.tolist()
    (1.0, 3.0, [[1.0], [0.0]])
    """
    op = "normalize_grad_sums"
    g = check_tensor(op, "g", g)
    x = check_kept(op, x, g)
    a, b, mask = check_gate(op, g, a, b, mask, activation)
    path = path_for(op, g, *tensors_of(x), a, b, mask)
    if path is not None:
        numbers = kernels.backward_numbers(g, x, a, b, mask, activation)
        return GradSums(*kernels.normalize_grad_sums(path, g, numbers, want_masked, want_squares))
    with torch.no_grad():
        total, dot, squares, masked = plain.normalize_grad_sums(g, x, a, b, mask, activation)
    return GradSums(total, dot, squares if want_squares else None, masked if want_masked else None)


def normalize_grad(parts: GradientParts) -> Tensor:
    """dx = (p·gm + q·x) + r, with gm as in normalize_grad_sums.

    >>> g, x, one = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]]), torch.ones(2)
    >>> normalize_grad(GradientParts(g, x, None, None, None, "none", 2 * one, one, 10 * one)).tolist()
    [[15.0, 13.0]]
    """
    op = "normalize_grad"
    parts = check_parts(op, parts)
    path = path_of_parts(op, parts)
    if path is not None:
        return kernels.normalize_grad(path, parts.g, kernels.backward_numbers(*parts))
    with torch.no_grad():
        return plain.normalize_grad(parts)


def normalize_grad_quantize(parts: GradientParts, clip: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ops.quantize(dx, clip, key) with the dx of normalize_grad, which is never written: values, scale, counts, max|dx|.

    >>> g, x, one = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]]), torch.ones(2)
    >>> parts = GradientParts(g, x, None, None, None, "none", one, one, one)
    >>> normalize_grad_quantize(parts, torch.tensor(10.0), None)[0].tolist()
    [[64, 25]]
    """
    op = "normalize_grad_quantize"
    parts = check_parts(op, parts)
    clip, key = check_one(op, "clip", clip), check_key(op, key)
    path = path_of_parts(op, parts, clip, key)
    if path is not None:
        return kernels.normalize_grad_quantize(path, parts.g, kernels.backward_numbers(*parts), clip, key)
    with torch.no_grad():
        dx = plain.normalize_grad(parts)
        return reference.quantize(dx, clip.reshape((1,) * dx.dim()), key)
