# SPDX-License-Identifier: Apache-2.0
"""The backward passes of the fused block: from the gradient of its result to that of the convolution's output.

There are two passes over (g, x). The first computes the sums that the gradient of a BatchNorm needs (`norm.py` computes p, q
and r from them; `normalize_grad_batch` does both in one call). The second computes dx = (p·gm + q·x) + r, as float or as int8.
A gradient is quantized twice if grad_input uses one scale for the tensor and grad_weight one for each channel. dx
(`GradientParts`) is computed again for each reading, which is faster than writing and reading it.

The legend is that of block.py. g is (N, C, ...), float32 or rounded to bfloat16, x is the saved input of the BatchNorm, p, q, r
are float32 vectors (C,).
"""

from __future__ import annotations

import torch
from torch import Tensor

from byteback.ops.backends.registry import Backend, backend_for
from byteback.ops.checks import (
    check_gate,
    check_kept,
    check_key,
    check_one,
    check_parts,
    check_stream,
    check_tensor,
    check_vector,
)
from byteback.ops.quantize import check_clips
from byteback.ops.types import GradientParts, GradSums, Kept, NormGradient, QTensor, tensors_of


def _backend_for(op: str, parts: GradientParts, *others: Tensor | None) -> Backend:
    """Returns the backend for a gradient that is not stored and the other tensors."""
    g, x, a, b, mask, _, p, q, r = parts
    return backend_for(op, g, *tensors_of(x), a, b, mask, p, q, r, *others)


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
    """Returns the sums per channel that the gradient of the norm needs, and gm, the gradient of the residual branch.

    gm = g · activation'(z). For none, relu and relu6 it is g or 0, by the mask if there is one, else by z. Smooth activations
    always use z = a·x + b. `none` without a mask needs neither a nor b. gm has the dtype of g; of a smooth activation float32.

    >>> g, x = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [-1.0]])
    >>> sums = normalize_grad_sums(g, x, torch.ones(1), torch.zeros(1), None, "relu", want_masked=True)
    >>> sums.total.item(), sums.dot.item(), sums.masked.tolist()
    (1.0, 3.0, [[1.0], [0.0]])
    """
    op = "normalize_grad_sums"
    g = check_stream(op, "g", g)
    x = check_kept(op, x, g)
    a, b, mask = check_gate(op, g, a, b, mask, activation)
    backend = backend_for(op, g, *tensors_of(x), a, b, mask)
    return backend.normalize_grad_sums(g, x, a, b, mask, activation, want_masked, want_squares)


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
) -> NormGradient:
    """Computes normalize_grad_sums, norm_gradient and, with `want_sums`, gradient_sums in one call.

    The arguments are those of these functions. The results are q and r of dx and the gradients of gamma and beta.

    >>> g, x, one = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [-1.0]]), torch.ones(1)
    >>> wants = {"want_masked": False, "want_sums": False}
    >>> made = normalize_grad_batch(g, x, one, one, None, "none", one.double(), one.double(), 0.0, **wants)
    >>> made.beta.item(), made.gamma.item()
    (3.0, -2.0)
    """
    op = "normalize_grad_batch"
    g = check_stream(op, "g", g)
    x = check_kept(op, x, g)
    _, gate_b, mask = check_gate(op, g, a, b, mask, activation)
    channels = g.shape[1]
    a = check_vector(op, "a", a, channels)
    mean, invstd = (check_vector(op, n, v, channels, torch.float64) for n, v in (("mean", mean), ("invstd", invstd)))
    backend = backend_for(op, g, *tensors_of(x), a, gate_b, mask, mean, invstd)
    return backend.normalize_grad_batch(g, x, a, gate_b, mask, activation, mean, invstd, eps, want_masked, want_sums)


def normalize_grad(parts: GradientParts) -> Tensor:
    """Returns dx = (p·gm + q·x) + r, with gm as in normalize_grad_sums.

    >>> g, x, one = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]]), torch.ones(2)
    >>> normalize_grad(GradientParts(g, x, None, None, None, "none", 2 * one, one, 10 * one)).tolist()
    [[15.0, 13.0]]
    """
    op = "normalize_grad"
    parts = check_parts(op, parts)
    return _backend_for(op, parts).normalize_grad(parts)


def normalize_grad_quantize(parts: GradientParts, clip: Tensor, key: Tensor | None) -> QTensor:
    """Returns ops.quantize(dx, clip, key) with the dx of normalize_grad, which is not stored: values, scale, counts, max|dx|.

    >>> g, x, one = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]]), torch.ones(2)
    >>> parts = GradientParts(g, x, None, None, None, "none", one, one, one)
    >>> normalize_grad_quantize(parts, torch.tensor(10.0), None)[0].tolist()
    [[64, 25]]
    """
    op = "normalize_grad_quantize"
    parts = check_parts(op, parts)
    clip, key = check_one(op, "clip", clip), check_key(op, key)
    return _backend_for(op, parts, clip, key).normalize_grad_quantize(parts, clip, key)


def add_waiting(x: Tensor, g: Tensor, mask: Tensor | None) -> Tensor:
    """Returns x + g, or with the mask of an activation x + gm as in normalize_grad_sums, without writing gm.

    >>> mask = torch.tensor([[1]], dtype=torch.uint8)
    >>> add_waiting(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), mask).tolist()
    [[4.0, 2.0]]
    """
    op = "add_waiting"
    x, g = check_tensor(op, "x", x), check_stream(op, "g", g)
    if x.shape != g.shape:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)} and g {tuple(g.shape)}. Pass two gradients of one tensor.")
    if mask is not None:
        _, _, mask = check_gate(op, g, None, None, mask, "none")
    return backend_for(op, x, g, mask).add_waiting(x, g, mask)


# ---- several results from one reading --------------------------------------------------------------------------------


def normalize_grad_tails(parts: GradientParts, per_channel: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns max|dx| of each channel and tail_count_pair(dx, per_channel, threshold). dx (normalize_grad) is not stored.

    >>> g, one, nothing = torch.tensor([[1.0, -3.0], [2.0, 0.5]]), torch.ones(2), torch.zeros(2)
    >>> parts = GradientParts(g, g, None, None, None, "none", one, nothing, nothing)
    >>> [t.tolist() for t in normalize_grad_tails(parts, torch.tensor([0.5, 4.0]), torch.tensor(0.75))]
    [[[2.0, 3.0]], [[2, 0]], [[2, 1]]]
    """
    op = "normalize_grad_tails"
    parts = check_parts(op, parts)
    per_channel = check_vector(op, "per_channel", per_channel, parts.g.shape[1])
    threshold = check_one(op, "threshold", threshold)
    return _backend_for(op, parts, per_channel, threshold).normalize_grad_tails(parts, per_channel, threshold)


def normalize_grad_quantize_pair(
    parts: GradientParts, clip: Tensor, clip_per_channel: Tensor, key: Tensor | None
) -> tuple[QTensor, QTensor]:
    """Returns quantize_pair(dx, ...) with the dx of normalize_grad, which is not stored.

    >>> g, one, nothing = torch.tensor([[1.0, -3.0]]), torch.ones(2), torch.zeros(2)
    >>> parts = GradientParts(g, g, None, None, None, "none", one, nothing, nothing)
    >>> both = normalize_grad_quantize_pair(parts, torch.tensor(3.0), torch.tensor([[1.0, 6.0]]), None)
    >>> [values.tolist() for values, *_ in both]
    [[[42, -127]], [[127, -64]]]
    """
    op = "normalize_grad_quantize_pair"
    parts = check_parts(op, parts)
    clip, clip_per_channel, key = check_clips(op, parts.g, clip, clip_per_channel, key)
    backend = _backend_for(op, parts, clip, clip_per_channel, key)
    return backend.normalize_grad_quantize_pair(parts, clip, clip_per_channel, key)


def normalize_grad_quantize_by_ratio(parts: GradientParts, ratio: float, key: Tensor | None) -> tuple[Tensor, QTensor]:
    """Returns clip = ratio · max|dx| of each channel, and ops.quantize(dx, clip, key). dx (normalize_grad) is not stored.

    >>> g, one, nothing = torch.tensor([[1.0, -4.0], [0.5, 2.0]]), torch.ones(2), torch.zeros(2)
    >>> parts = GradientParts(g, g, None, None, None, "none", one, nothing, nothing)
    >>> clip, (values, *_) = normalize_grad_quantize_by_ratio(parts, 0.5, None)
    >>> clip.tolist(), values.tolist()
    ([[0.5, 2.0]], [[127, -127], [127, 127]])
    """
    op = "normalize_grad_quantize_by_ratio"
    parts, key = check_parts(op, parts), check_key(op, key)
    return _backend_for(op, parts, key).normalize_grad_quantize_by_ratio(parts, ratio, key)
