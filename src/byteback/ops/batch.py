# SPDX-License-Identifier: Apache-2.0
"""The passes of a block whose norm uses its batch, one call for each direction.

    normalize_batch       channel_stats, norm_coefficients, (normalize_peak), normalize
    normalize_grad_batch  normalize_grad_sums, norm_gradient, (gradient_sums)

That is the definition, and the bits are the same: the native library takes these steps one after the other without coming
back to Python, which for a small layer would take longer than a pass.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.ops import native, pool
from byteback.ops.coefficients import CEILINGS, are_plain, gradient_sums, norm_coefficients, norm_gradient
from byteback.ops.layout import is_last_dense
from byteback.ops.normalize import Kept, Normalized, Residual, channel_stats, normalize, normalize_peak
from byteback.ops.normalize_checks import check_activation, check_gate, check_kept, check_tensor, path_for
from byteback.ops.normalize_grad import normalize_grad_sums
from byteback.ops.normalize_native import backward_numbers, kept_numbers, residual_numbers

_library: Any = native.library
_float32, _float64, _empty = torch.float32, torch.float64, torch.empty


class BatchNorm(NamedTuple):
    """The parameters of a norm in training; each vector (C,) or None. `bias` is the convolution's, which x leaves out."""

    gamma: Tensor | None
    beta: Tensor | None
    bias: Tensor | None
    eps: float
    running: tuple[Tensor, Tensor] | None
    momentum: float


class NormalizedBatch(NamedTuple):
    """a, b, mean and invstd as norm_coefficients gives them, max|result| where it is known, and what `normalize` gave."""

    a: Tensor
    b: Tensor
    mean: Tensor
    invstd: Tensor
    peak: Tensor | None
    made: Normalized


class BatchGradient(NamedTuple):
    """What norm_gradient gives; the masked gradient, and Σdx and Σdx² (gradient_sums), if they were asked for."""

    q: Tensor
    r: Tensor
    gamma: Tensor
    beta: Tensor
    masked: Tensor | None
    sums: tuple[Tensor, Tensor] | None


def normalize_batch(
    x: Tensor,
    norm: BatchNorm,
    residual: Residual,
    activation: str,
    *,
    want_int8: bool,
    want_float: bool,
    want_mask: bool,
    keep: str | None = None,
) -> NormalizedBatch:
    """The norm of x by its own statistics, then activation(a·x + b + residual): as int8 by its maximum, as float32, its mask.

    `keep` also gives x itself as "bfloat16" or "int8" (`pack_norm` by the batch's extremes and mean), for backward. Moves the
    running statistics. The peak is known with int8, and without a residual under a monotone activation.

    >>> norm = BatchNorm(None, None, None, 0.0, None, 0.1)
    >>> result = normalize_batch(
    ...     torch.tensor([[1.0], [3.0]]), norm, None, "relu", want_int8=True, want_float=True, want_mask=False
    ... )
    >>> result.peak.item(), result.made.output.tolist(), result.made.values.tolist()
    (1.0, [[0.0], [1.0]], [[0], [127]])
    """
    known = residual is None and activation in CEILINGS
    vectors = (norm.gamma, norm.beta, norm.bias, *(norm.running or (None, None)))
    path = native.number()
    if path is None or not _is_ready(x, vectors, residual):
        return _step_by_step(x, norm, residual, activation, known, want_int8, want_float, want_mask, keep)
    channels = x.shape[1]
    rows = x.numel() // channels
    a, b, peak = _empty(channels, dtype=_float32), _empty(channels, dtype=_float32), _empty((), dtype=_float32)
    mean, invstd = _empty(channels, dtype=_float64), _empty(channels, dtype=_float64)
    values = scale = counts = output = mask = None
    if want_int8:
        values = pool.empty(x.shape, x.stride(), torch.int8)
        scale, counts = _empty((1,) * x.dim(), dtype=_float32), _empty(2, dtype=torch.int64)
    if want_float:
        output = pool.empty(x.shape, x.stride(), _float32)
    if want_mask and activation in CEILINGS:
        mask = _empty((rows, (channels + 7) // 8), dtype=torch.uint8)
    kept = _place_for(x, keep)
    place, kind, step, centre = kept_numbers(kept)
    results = (a, b, mean, invstd, peak, values, scale, counts, output, mask)
    _library.normalize_batch(
        path,
        (rows, channels, x.data_ptr(), *[0 if v is None else v.data_ptr() for v in vectors], *residual_numbers(residual)),
        norm.eps,
        norm.momentum,
        check_activation("normalize_batch", activation),
        activation != "none",
        CEILINGS.get(activation, math.inf),
        known,
        kind,
        [*(0 if result is None else result.data_ptr() for result in results), place, step, centre],
        torch.get_num_threads(),
    )
    made = Normalized(values, scale, output, mask, counts, kept)
    return NormalizedBatch(a, b, mean, invstd, peak if known or want_int8 else None, made)


def _place_for(x: Tensor, keep: str | None) -> Kept | None:
    """An empty place for x in a smaller form."""
    if keep is None:
        return None
    if keep == "bfloat16":
        return pool.empty(x.shape, x.stride(), torch.bfloat16)
    if keep != "int8":
        raise ValueError(f"normalize_batch: x cannot be kept as {keep!r}; there are 'bfloat16' and 'int8'.")
    channels = x.shape[1]
    return pool.empty(x.shape, x.stride(), torch.int8), _empty(channels, dtype=_float32), _empty(channels, dtype=_float32)


def _is_ready(x: Tensor, vectors: tuple[Tensor | None, ...], residual: Residual) -> bool:
    """Whether the native library can take these tensors as they are."""
    if x.dtype is not _float32 or not x.is_cpu or x.dim() < 2 or not x.numel() or not is_last_dense(x.shape, x.stride()):
        return False
    if not are_plain(vectors, x.shape[1]):
        return False
    if residual is None:
        return True
    values, kind = (residual, _float32) if isinstance(residual, Tensor) else (residual[0], torch.int8)
    fits = values.shape == x.shape and values.stride() == x.stride() and values.dtype is kind and values.is_cpu
    return fits and (values is residual or (residual[1].numel() == 1 and residual[1].dtype is _float32))


def _step_by_step(
    x: Tensor,
    norm: BatchNorm,
    residual: Residual,
    activation: str,
    known: bool,
    want_int8: bool,
    want_float: bool,
    want_mask: bool,
    keep: str | None,
) -> NormalizedBatch:
    stats, count = channel_stats(x), x.numel() // max(x.shape[1], 1)
    gamma, beta, bias, eps, running, momentum = norm
    a, b, mean, invstd, peak = norm_coefficients(stats, count, gamma, beta, bias, eps, running, momentum, activation)
    if want_int8 and not known:
        peak = normalize_peak(x, a, b, residual, activation)
    made = Normalized(None, None, None, None, None)
    if want_int8 or want_float or want_mask or keep:
        clip = peak if want_int8 else None
        extremes = {"low": stats[2], "high": stats[3], "mean": mean}
        wants: dict[str, Any] = {"want_float": want_float, "want_mask": want_mask, "keep": keep, **extremes}
        made = normalize(x, a, b, residual, activation, clip, **wants)
    return NormalizedBatch(a, b, mean, invstd, peak if known or want_int8 else None, made)


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
    path = path_for(g, *(x if isinstance(x, tuple) else (x,)), a, b, mask, mean, invstd)
    channels = g.shape[1]
    dense = all(v.is_contiguous() and v.numel() == channels for v in (a, mean, invstd))
    if path is None or not dense or mean.dtype is not _float64 or invstd.dtype is not _float64:
        seen = normalize_grad_sums(g, x, a, b, mask, activation, want_masked=want_masked, want_squares=want_sums)
        count = g.numel() // max(channels, 1)
        q, r, gamma, beta = norm_gradient(a, mean, invstd, seen.total, seen.dot, count)
        sums = None
        if seen.squares is not None:
            sums = gradient_sums(a, q, r, mean, invstd, eps, seen.total, seen.dot, seen.squares, count)
        return BatchGradient(q, r, gamma, beta, seen.masked, sums)
    g = check_tensor(op, "g", g)
    x = check_kept(op, x, g)
    gate = check_gate(op, g, a, b, mask, activation)
    masked = pool.empty(g.shape, g.stride(), _float32) if want_masked else None
    q, r, gamma, beta = (_empty(channels, dtype=_float32) for _ in range(4))
    sums = (_empty(channels, dtype=_float64), _empty(channels, dtype=_float64)) if want_sums else None
    _library.normalize_grad_batch(
        path,
        backward_numbers(g, x, *gate, activation),
        (a.data_ptr(), mean.data_ptr(), invstd.data_ptr()),
        eps,
        [0 if to is None else to.data_ptr() for to in (q, r, gamma, beta, masked, *(sums or (None, None)))],
        torch.get_num_threads(),
    )
    return BatchGradient(q, r, gamma, beta, masked, sums)
