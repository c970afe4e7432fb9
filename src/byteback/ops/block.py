# SPDX-License-Identifier: Apache-2.0
"""The forward passes of the fused training block: convolution → BatchNorm → (residual add) → activation → int8.

BatchNorm with batch statistics is one multiplication and one addition per channel, so forward is one or two passes over the
output of the convolution. `block_grad.py` has the backward passes. All are plain functions for tensors without gradients,
outside torch.compile. Three of them combine others in one call, with the same bits. For a small layer, the Python code between
two passes would take longer than a pass.

    conv_normalize        conv_int8 and normalize: the product is not stored as float (predictions)
    normalize_batch       channel_stats, norm_coefficients, (normalize_peak), normalize
    conv_normalize_batch  conv_int8 and normalize_batch

Legend: x and residual are (N, C, ...), float32 or bfloat16. A residual may also be (values int8, scale), which means
values · scale. a, b are float32 vectors (C,). Each operation rounds to float32 once, in the order written.
z = a·x + b (+ residual). activations.py has the activations. Results are channels last. NaN inputs give NaN.

A mask stores the derivative of none, relu and relu6 as bits: uint8 (pixels, ceil(C / 8)), bit c % 8 of byte c // 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from byteback.ops import dispatch
from byteback.ops.backends.registry import backend_for
from byteback.ops.checks import (
    check_activation,
    check_extremes,
    check_into,
    check_norm,
    check_one,
    check_residual,
    check_stored,
    check_stream,
    check_vector,
)
from byteback.ops.contract.bfloat16 import to_bfloat16
from byteback.ops.contract.geometry import geometry as checked_geometry
from byteback.ops.contract.layout import channels_last
from byteback.ops.products import conv_int8, output_call
from byteback.ops.types import BatchNorm, Into, Kept, Normalized, Residual, Wants, tensors_of


def normalize_peak(x: Tensor, a: Tensor, b: Tensor, residual: Residual, activation: str) -> Tensor:
    """Returns max|activation(a·x + b + residual)| as a 0-dim tensor: NaN if any element is NaN, 0 for an empty tensor.

    >>> normalize_peak(torch.tensor([[1.0], [-4.0]]), torch.tensor([2.0]), torch.tensor([1.0]), None, "relu").item()
    3.0
    """
    op = "normalize_peak"
    x = check_stream(op, "x", x)
    channels = x.shape[1]
    a, b = check_vector(op, "a", a, channels), check_vector(op, "b", b, channels)
    check_activation(op, activation)
    residual = check_residual(op, residual, x.shape)
    return backend_for(op, x, a, b, *tensors_of(residual)).normalize_peak(x, a, b, residual, activation)


def normalize(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    residual: Residual,
    activation: str,
    clip: Tensor | None,
    *,
    want_float: bool,
    want_mask: bool,
    keep: str | None = None,
    low: Tensor | None = None,
    high: Tensor | None = None,
    mean: Tensor | None = None,
    into: Into | None = None,
) -> Normalized:
    """Computes y = activation(a·x + b + residual) in one pass: as int8 by `clip`, as float32, and its mask.

    `clip` is one float32 number; None means no int8. q has values, scale and counts of ops.quantize(y, clip). Smooth
    activations have no mask (None): backward computes z again. `keep` also returns pack_norm(x, low, high, mean, keep) as
    `kept`, without reading x again. `into` has the tensors that values and output are written to: slices of wider tensors,
    for a concatenation.

    >>> x, one = torch.tensor([[1.0, -3.0]]), torch.ones(2)
    >>> result = normalize(x, one, one, None, "relu", torch.tensor(2.0), want_float=True, want_mask=True)
    >>> result.q.values.tolist(), result.output.tolist(), result.mask.tolist(), result.q.counts.tolist()
    ([[127, 0]], [[2.0, 0.0]], [[1]], [0, 0])
    """
    op = "normalize"
    x = check_stream(op, "x", x)
    channels = x.shape[1]
    a, b = check_vector(op, "a", a, channels), check_vector(op, "b", b, channels)
    check_activation(op, activation)
    residual = check_residual(op, residual, x.shape)
    places = check_into(op, into, x.shape, clip, want_float)
    clip = None if clip is None else check_one(op, "clip", clip)
    extremes = None if keep is None else check_extremes(op, x, low, high, mean, keep)
    backend = backend_for(op, x, a, b, *tensors_of(residual), clip, *(extremes or ()), *places)
    return backend.normalize(x, a, b, residual, activation, clip, want_float, want_mask, keep, extremes, into)


def pack_norm(x: Tensor, low: Tensor | None, high: Tensor | None, mean: Tensor | None, kind: str) -> Kept:
    """Returns the input of a BatchNorm in a smaller form for backward: as bfloat16, or as int8 around the mean of each channel.

    int8: step = max(|low - mean|, |high - mean|) / 127 (1 if that counts as zero), values = round((x - mean) · (1 / step))
    within ±127, returned with step and centre = mean, (C,) each. Backward reads values · step + mean.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> values, step, centre = pack_norm(x, torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([2.0]), "int8")
    >>> values.tolist(), centre.tolist()
    ([[-127], [127]], [2.0])
    """
    op = "pack_norm"
    x = check_stream(op, "x", x)
    extremes = check_extremes(op, x, low, high, mean, kind)
    return backend_for(op, x, *(extremes or ())).pack_norm(x, kind, extremes)


def conv_normalize(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    geometry: tuple[Any, ...],
    a: Tensor,
    b: Tensor,
    residual: Residual,
    activation: str,
    clip: Tensor | None,
    *,
    want_float: bool,
    into: Into | None = None,
) -> Normalized:
    """Computes normalize(conv_int8(x, x_scale, w, w_scale, *geometry), a, b, residual, activation, clip) in one pass.

    geometry is stride, padding, dilation and groups. q and output are as in `normalize`.

    >>> x, w, one = torch.tensor([[[[3]]]], dtype=torch.int8), torch.tensor([[[[5]]]], dtype=torch.int8), torch.ones(1, 1, 1, 1)
    >>> flat = ((1, 1), (0, 0), (1, 1), 1)
    >>> made = conv_normalize(x, one, w, one, flat, torch.ones(1), torch.ones(1), None, "relu", None, want_float=True)
    >>> made.output.item()
    16.0
    """
    op, operands = "conv_normalize", (x, x_scale, w, w_scale)
    geometry = checked_geometry(op, x.dim() - 2, geometry)
    backend = backend_for(op, *operands, a, b, *tensors_of(residual), clip, *(into or ())[:2])
    call = output_call(backend, *operands, geometry)
    a, b = check_vector(op, "a", a, call.channels), check_vector(op, "b", b, call.channels)
    check_activation(op, activation)
    residual = check_residual(op, residual, call.size)
    check_into(op, into, call.size, clip, want_float)
    clip = None if clip is None else check_one(op, "clip", clip)
    return backend.conv_normalize(call, operands, a, b, residual, activation, clip, want_float, into)


# ---- a norm with batch statistics ------------------------------------------------------------------------------------


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
    output_dtype: torch.dtype = torch.float32,
    want_packed: bool = False,
) -> Normalized:
    """Computes the norm of x with batch statistics, and `normalize` with it. The clip of the int8 result is its maximum.

    `keep` ("bfloat16" or "int8") also returns `pack_norm` of x, by the extremes and means of the batch. Updates the running
    statistics. The peak is known if `want_int8` is set, or without a residual if the activation is monotone. With
    `output_dtype` bfloat16 the float result is rounded when it is written; the int8 result is made of what it was before. With
    `want_packed`, a GPU also writes a packed copy of the int8 result (PackedQTensor).

    >>> norm = BatchNorm(None, None, None, 0.0, None, 0.1)
    >>> result = normalize_batch(
    ...     torch.tensor([[1.0], [3.0]]), norm, None, "relu", want_int8=True, want_float=True, want_mask=False
    ... )
    >>> result.norm.peak.item(), result.output.tolist(), result.q.values.tolist()
    (1.0, [[0.0], [1.0]], [[0], [127]])
    """
    op = "normalize_batch"
    x = check_stream(op, "x", x)
    norm, residual = _check_batch(op, x.shape, norm, residual, activation, keep)
    check_stored(op, output_dtype=output_dtype)
    backend = backend_for(op, x, *_vectors(norm), *tensors_of(residual))
    wants = Wants(want_int8, want_float, want_mask, keep, x.dtype, output_dtype, want_packed)
    return backend.normalize_batch(x, norm, residual, activation, wants)


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
    output_dtype: torch.dtype = torch.float32,
    y_dtype: torch.dtype = torch.float32,
    want_packed: bool = False,
) -> tuple[Tensor, Normalized]:
    """Returns y = conv_int8(x, x_scale, w, w_scale, *geometry), channels last, and normalize_batch(y, norm, ...).

    With `y_dtype` bfloat16, y is rounded when it is written. The statistics are those of the rounded values.

    >>> x, w = torch.tensor([[[[1, 3]]]], dtype=torch.int8), torch.tensor([[[[1]]]], dtype=torch.int8)
    >>> one = torch.ones(1, 1, 1, 1)
    >>> norm, flat = BatchNorm(None, None, None, 0.0, None, 0.1), ((1, 1), (0, 0), (1, 1), 1)
    >>> wants = {"want_int8": False, "want_float": True, "want_mask": False}
    >>> y, result = conv_normalize_batch(x, one, w, one, flat, norm, None, "relu", **wants)
    >>> y.flatten().tolist(), result.output.flatten().tolist()
    ([1.0, 3.0], [0.0, 1.0])
    """
    op, operands = "conv_normalize_batch", (x, x_scale, w, w_scale)
    geometry = checked_geometry(op, x.dim() - 2, geometry)
    check_stored(op, output_dtype=output_dtype, y_dtype=y_dtype)
    backend = backend_for(op, *operands, *_vectors(norm), *tensors_of(residual))
    if not dispatch.is_plain(operands):  # a profiler or a dispatch mode must see the operator of the product
        y = channels_last(conv_int8(*operands, *geometry))
        y = to_bfloat16(y) if y_dtype is torch.bfloat16 else y
        wanted: dict[str, Any] = {"want_int8": want_int8, "want_float": want_float, "want_mask": want_mask}
        wanted |= {"keep": keep, "output_dtype": output_dtype, "want_packed": want_packed}
        return y, normalize_batch(y, norm, residual, activation, **wanted)
    call = output_call(backend, *operands, geometry)
    norm, residual = _check_batch(op, call.size, norm, residual, activation, keep)
    wants = Wants(want_int8, want_float, want_mask, keep, y_dtype, output_dtype, want_packed)
    return backend.conv_normalize_batch(call, operands, norm, residual, activation, wants)


def _vectors(norm: BatchNorm) -> tuple[Tensor | None, ...]:
    return norm.gamma, norm.beta, norm.bias, *(norm.running or ())


def _check_batch(
    op: str, shape: Sequence[int], norm: BatchNorm, residual: Residual, activation: str, keep: str | None
) -> tuple[BatchNorm, Residual]:
    """Returns the norm and the residual for an x of this shape, checked and dense."""
    check_activation(op, activation)
    if keep not in (None, "bfloat16", "int8"):
        raise ValueError(f"{op}: keep is {keep!r}, but must be 'bfloat16', 'int8' or None.")
    return check_norm(op, norm, shape[1]), check_residual(op, residual, shape)
