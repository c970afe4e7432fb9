# SPDX-License-Identifier: Apache-2.0
"""The sums of a block's backward pass whose norm uses its batch, in one call.

    normalize_grad_batch  normalize_grad_sums, norm_gradient, (gradient_sums)

As in batch.py, that is the definition, and the native library takes these steps without coming back to Python.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.addresses import flat, known, new
from byteback.ops import native, pool
from byteback.ops.coefficients import gradient_sums, norm_gradient
from byteback.ops.normalize import Kept
from byteback.ops.normalize_checks import check_gate, check_kept, check_tensor, check_vector, path_for, tensors_of
from byteback.ops.normalize_grad import normalize_grad_sums
from byteback.ops.normalize_native import backward_numbers

_library: Any = native.library
_float32, _float64 = torch.float32, torch.float64


class BatchGradient(NamedTuple):
    """What norm_gradient gives; the masked gradient, and Σdx and Σdx² (gradient_sums), if they were asked for."""

    q: Tensor
    r: Tensor
    gamma: Tensor
    beta: Tensor
    masked: Tensor | None
    sums: tuple[Tensor, Tensor] | None


def normalize_grad_batch(
    g: Tensor,
    x: Kept,
    a: Tensor,
    b: Tensor,
    mask: Tensor | None,
    activation: str,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
    *,
    want_masked: bool,
    want_sums: bool,
) -> BatchGradient:
    """From the gradient of the result to q and r of x's gradient and to those of gamma and beta; arguments as in the steps.

    >>> g, x, one = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [-1.0]]), torch.ones(1)
    >>> wants = {"want_masked": False, "want_sums": False}
    >>> made = normalize_grad_batch(g, x, one, one, None, "none", one.double(), one.double(), 0.0, **wants)
    >>> made.beta.item(), made.gamma.item()
    (3.0, -2.0)
    """
    op = "normalize_grad_batch"
    g = check_tensor(op, "g", g)
    x = check_kept(op, x, g)
    gate = check_gate(op, g, a, b, mask, activation)
    channels = g.shape[1]
    a = check_vector(op, "a", a, channels)
    mean, invstd = (check_vector(op, n, v, channels, _float64) for n, v in (("mean", mean), ("invstd", invstd)))
    path = path_for(op, g, *tensors_of(x), *gate, a, mean, invstd)
    if path is None:
        seen = normalize_grad_sums(g, x, a, b, mask, activation, want_masked=want_masked, want_squares=want_sums)
        count = g.numel() // max(channels, 1)
        q, r, gamma, beta = norm_gradient(a, mean, invstd, seen.total, seen.dot, count)
        sums = None
        if seen.squares is not None:
            sums = gradient_sums(a, q, r, mean, invstd, eps, seen.total, seen.dot, seen.squares, count)
        return BatchGradient(q, r, gamma, beta, seen.masked, sums)
    masked = pool.empty_like(g) if want_masked else None
    q, r, gamma, beta = (new(channels, _float32) for _ in range(4))
    sums = (new(channels, _float64), new(channels, _float64)) if want_sums else None
    _library.normalize_grad_batch(
        path,
        backward_numbers(g, x, *gate, activation),
        (flat(a, _float32, channels), flat(mean, _float64, channels), flat(invstd, _float64, channels)),
        eps,
        [known(to) for to in (q, r, gamma, beta, masked, *(sums or (None, None)))],
        torch.get_num_threads(),
    )
    return BatchGradient(q, r, gamma, beta, masked, sums)
