# SPDX-License-Identifier: Apache-2.0
"""The forward passes of a block whose norm uses its batch, in one call.

    normalize_batch       channel_stats, norm_coefficients, (normalize_peak), normalize
    conv_normalize_batch  conv_int8 and normalize_batch

That is the definition, and the bits are the same: the native library takes these steps one after the other without coming
back to Python, which for a small layer would take longer than a pass. A large output is counted on its way to memory
(csrc/statistics_epilogue_avx2.cpp) and not read for it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.addresses import CPU, flat, known, last, new
from byteback.ops import eager, native, native_kernels, pool, schema_products
from byteback.ops.coefficients import CEILINGS, norm_coefficients
from byteback.ops.finished import last_strides
from byteback.ops.geometry import geometry as checked_geometry
from byteback.ops.normalize import Kept, Normalized, Residual, channel_stats, normalize, normalize_peak
from byteback.ops.normalize_checks import (
    Running,
    check_activation,
    check_optional,
    check_residual,
    check_running,
    check_tensor,
    path_for,
    tensors_of,
)
from byteback.ops.normalize_native import kept_numbers, residual_numbers
from byteback.ops.normalize_reference import channels_last

_library: Any = native.library
_float32, _float64, _int64, _int8, _uint8 = torch.float32, torch.float64, torch.int64, torch.int8, torch.uint8


class BatchNorm(NamedTuple):
    """The parameters of a norm in training; each vector (C,) or None. `bias` is the convolution's, which x leaves out."""

    gamma: Tensor | None
    beta: Tensor | None
    bias: Tensor | None
    eps: float
    running: Running
    momentum: float


class NormalizedBatch(NamedTuple):
    """a, b, mean and invstd as norm_coefficients gives them, max|result| where it is known, and what `normalize` gave."""

    a: Tensor
    b: Tensor
    mean: Tensor
    invstd: Tensor
    peak: Tensor | None
    made: Normalized


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
    op = "normalize_batch"
    x = check_tensor(op, "x", x)
    norm, residual, writable = _checked(op, x, norm, residual, activation, keep)
    path = path_for(op, x, *_vectors(norm), *tensors_of(residual))
    if path is None or not writable:
        return _step_by_step(x, norm, residual, activation, want_int8, want_float, want_mask, keep)
    request, made, alive = _request(x, norm, residual, activation, want_int8, want_float, want_mask, keep)
    _library.normalize_batch(path, *request)
    del alive
    return made


def conv_normalize_batch(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    geometry: tuple[Any, ...],
    norm: BatchNorm,
    residual: Residual,
    activation: str,
    *,
    want_int8: bool,
    want_float: bool,
    want_mask: bool,
    keep: str | None = None,
) -> tuple[Tensor, NormalizedBatch]:
    """y = conv_int8(x, x_scale, w, w_scale, *geometry), channels last, and normalize_batch(y, norm, ...).

    >>> x, w = torch.tensor([[[[1, 3]]]], dtype=torch.int8), torch.tensor([[[[1]]]], dtype=torch.int8)
    >>> one = torch.ones(1, 1, 1, 1)
    >>> norm, flat = BatchNorm(None, None, None, 0.0, None, 0.1), ((1, 1), (0, 0), (1, 1), 1)
    >>> wants = {"want_int8": False, "want_float": True, "want_mask": False}
    >>> y, result = conv_normalize_batch(x, one, w, one, flat, norm, None, "relu", **wants)
    >>> y.flatten().tolist(), result.made.output.flatten().tolist()
    ([1.0, 3.0], [0.0, 1.0])
    """
    op = "conv_normalize_batch"
    geometry = checked_geometry(op, x.dim() - 2, geometry)
    path = path_for(op, x, x_scale, w, w_scale, *_vectors(norm), *tensors_of(residual))
    # Whoever watches operators, such as the profiler, shall see the product.
    if path is not None and w.numel() and eager.is_plain((x, x_scale, w, w_scale)):
        product = schema_products.output_plan(x, x_scale, w, w_scale, *geometry)
        y = pool.empty(product.size, last_strides(product.size), _float32, CPU)
        norm, residual, writable = _checked(op, y, norm, residual, activation, keep)
        if writable:
            x, w, scales, strides, factors = native_kernels.laid_out(path, product, x, x_scale, w, w_scale)
            request, made, alive = _request(y, norm, residual, activation, want_int8, want_float, want_mask, keep)
            operands = product.shape, known(x), known(w), scales, strides
            native.last_kernel = _library.conv_normalize_batch(path, *operands, *request)
            del factors, alive
            return y, made
    y = channels_last(schema_products.conv_int8(x, x_scale, w, w_scale, *geometry))
    return y, normalize_batch(
        y, norm, residual, activation, want_int8=want_int8, want_float=want_float, want_mask=want_mask, keep=keep
    )


def _vectors(norm: BatchNorm) -> tuple[Tensor | None, ...]:
    return norm.gamma, norm.beta, norm.bias, *(norm.running or (None, None))


def _checked(
    op: str, x: Tensor, norm: BatchNorm, residual: Residual, activation: str, keep: str | None
) -> tuple[BatchNorm, Residual, bool]:
    """The norm and the residual of x, dense, and whether a kernel can write to the running statistics."""
    check_activation(op, activation)
    if keep not in (None, "bfloat16", "int8"):
        raise ValueError(f"{op}: x cannot be kept as {keep!r}; there are 'bfloat16' and 'int8'.")
    channels = x.shape[1]
    gamma, beta, bias, eps, running, momentum = norm
    gamma, beta = check_optional(op, "gamma", gamma, channels), check_optional(op, "beta", beta, channels)
    bias, writable = check_optional(op, "bias", bias, channels), check_running(op, running, channels)
    return BatchNorm(gamma, beta, bias, eps, running, momentum), check_residual(op, residual, x), writable


def _request(
    x: Tensor,
    norm: BatchNorm,
    residual: Residual,
    activation: str,
    want_int8: bool,
    want_float: bool,
    want_mask: bool,
    keep: str | None,
) -> tuple[tuple[Any, ...], NormalizedBatch, Tensor]:
    """What the native library is told, the result that it will fill, and what else must live until it has."""
    told = _tells_its_peak(residual, activation)
    count, channels = x.numel(), x.shape[1]
    rows, width, vectors = count // channels, (channels + 7) // 8, _vectors(norm)
    a, b, peak = new(channels, _float32), new(channels, _float32), new((), _float32)
    mean, invstd = new(channels, _float64), new(channels, _float64)
    values = scale = counts = output = mask = None
    if want_int8:
        values, scale, counts = pool.empty_like(x, _int8), new((1,) * x.dim(), _float32), new(2, _int64)
    if want_float:
        output = pool.empty_like(x)
    if want_mask and activation in CEILINGS:
        mask = pool.empty((rows, width), (width, 1), _uint8, CPU)
    kept = _place_for(x, keep)
    place, kind, step, centre = kept_numbers(kept, count, channels)
    results = (a, b, mean, invstd, peak, values, scale, counts, output, mask)
    given = [flat(vector, _float32, channels) for vector in vectors]
    request = (
        (rows, channels, last(x, _float32, count), *given, *residual_numbers(residual, count)),
        norm.eps,
        norm.momentum,
        check_activation("normalize_batch", activation),
        activation != "none",
        CEILINGS.get(activation, math.inf),
        told,
        kind,
        [*[known(result) for result in results], place, step, centre],
        torch.get_num_threads(),
    )
    made = Normalized(values, scale, output, mask, counts, kept)
    return request, NormalizedBatch(a, b, mean, invstd, peak if told or want_int8 else None, made), peak


def _tells_its_peak(residual: Residual, activation: str) -> bool:
    """Whether the extremes of each channel tell the largest value of the result."""
    return residual is None and activation in CEILINGS


def _place_for(x: Tensor, keep: str | None) -> Kept | None:
    """An empty place for x in a smaller form."""
    if keep is None:
        return None
    if keep == "bfloat16":
        return pool.empty_like(x, torch.bfloat16)
    channels = x.shape[1]
    return pool.empty_like(x, _int8), new(channels, _float32), new(channels, _float32)


def _step_by_step(
    x: Tensor,
    norm: BatchNorm,
    residual: Residual,
    activation: str,
    want_int8: bool,
    want_float: bool,
    want_mask: bool,
    keep: str | None,
) -> NormalizedBatch:
    known = _tells_its_peak(residual, activation)
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
