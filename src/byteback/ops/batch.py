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

from byteback.ops import eager, native, native_kernels, pool, schema_products
from byteback.ops.coefficients import CEILINGS, are_plain, norm_coefficients
from byteback.ops.finished import last_strides
from byteback.ops.layout import is_last_dense
from byteback.ops.normalize import Kept, Normalized, Residual, channel_stats, normalize, normalize_peak
from byteback.ops.normalize_checks import check_activation, path_for
from byteback.ops.normalize_native import kept_numbers, residual_numbers
from byteback.ops.normalize_reference import channels_last

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
    vectors = _vectors(norm)
    path = native.number()
    if path is None or not _is_ready(x, vectors, residual):
        return _step_by_step(x, norm, residual, activation, want_int8, want_float, want_mask, keep)
    request, made, alive = _request(x, norm, vectors, residual, activation, want_int8, want_float, want_mask, keep)
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
    vectors = _vectors(norm)
    path = path_for(x, x_scale, w, w_scale)
    # Whoever watches operators, such as the profiler, shall see the product.
    if path is not None and w.numel() and eager.is_plain((x, x_scale, w, w_scale)):
        product = schema_products.output_plan(x, x_scale, w, w_scale, *geometry)
        y = pool.empty(product.size, last_strides(product.size), _float32)
        if _is_ready(y, vectors, residual):
            x, w, scales, strides, factors = native_kernels.laid_out(path, product, x, x_scale, w, w_scale)
            request, made, alive = _request(y, norm, vectors, residual, activation, want_int8, want_float, want_mask, keep)
            operands = product.shape, x.data_ptr(), w.data_ptr(), scales, strides
            native.last_kernel = _library.conv_normalize_batch(path, *operands, *request)
            del factors, alive
            return y, made
    y = channels_last(schema_products.conv_int8(x, x_scale, w, w_scale, *geometry))
    return y, normalize_batch(
        y, norm, residual, activation, want_int8=want_int8, want_float=want_float, want_mask=want_mask, keep=keep
    )


def _vectors(norm: BatchNorm) -> tuple[Tensor | None, ...]:
    return norm.gamma, norm.beta, norm.bias, *(norm.running or (None, None))


def _request(
    x: Tensor,
    norm: BatchNorm,
    vectors: tuple[Tensor | None, ...],
    residual: Residual,
    activation: str,
    want_int8: bool,
    want_float: bool,
    want_mask: bool,
    keep: str | None,
) -> tuple[tuple[Any, ...], NormalizedBatch, Tensor]:
    """What the native library is told, the result that it will fill, and what else must live until it has."""
    known = _tells_its_peak(residual, activation)
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
        width = (channels + 7) // 8
        mask = pool.empty((rows, width), (width, 1), torch.uint8)
    kept = _place_for(x, keep)
    place, kind, step, centre = kept_numbers(kept)
    results = (a, b, mean, invstd, peak, values, scale, counts, output, mask)
    request = (
        (rows, channels, x.data_ptr(), *[0 if v is None else v.data_ptr() for v in vectors], *residual_numbers(residual)),
        norm.eps,
        norm.momentum,
        check_activation("normalize_batch", activation),
        activation != "none",
        CEILINGS.get(activation, math.inf),
        known,
        kind,
        [*[0 if result is None else result.data_ptr() for result in results], place, step, centre],
        torch.get_num_threads(),
    )
    made = Normalized(values, scale, output, mask, counts, kept)
    return request, NormalizedBatch(a, b, mean, invstd, peak if known or want_int8 else None, made), peak


def _tells_its_peak(residual: Residual, activation: str) -> bool:
    """Whether the extremes of each channel tell the largest value of the result."""
    return residual is None and activation in CEILINGS


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
