# SPDX-License-Identifier: Apache-2.0
"""The forward passes of a fused block in the native library.

Tensors are channels last and dense, vectors are dense, none is empty. These functions run a few hundred times per training
step, so they call little more than torch.empty and the checks in addresses.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from byteback.ops.activations import TABLE
from byteback.ops.backends import reference
from byteback.ops.backends.cpu import allocator, library
from byteback.ops.backends.cpu.addresses import CPU, KINDS, flat, known, last, new, part
from byteback.ops.backends.cpu.norm import is_writable
from byteback.ops.backends.cpu.products import laid_out
from byteback.ops.backends.cpu.products import product as run_product
from byteback.ops.backends.reference.block import norm_step
from byteback.ops.contract.layout import channels_last, last_strides
from byteback.ops.types import BatchNorm, Extremes, Into, Kept, Normalized, NormState, ProductCall, QTensor, Residual, Wants

_native: Any = library.native
# Bound once: after a large layer every attribute look-up in torch is a cache miss.
_threads = torch.get_num_threads
_FLOAT32, _FLOAT64, _INT64, _INT8, _UINT8 = torch.float32, torch.float64, torch.int64, torch.int8, torch.uint8
STORED = {None: 0, "bfloat16": 1, "int8": 2}
"""The form in which the input of a norm is saved: enum class Stored in csrc/block/norm.h."""


@lru_cache(maxsize=4096)
def forward_pass(
    rows: int,
    channels: int,
    activation: str,
    kept: int = 0,
    pitch: int | None = None,
    has_residual: bool = False,
    stored: tuple[torch.dtype, torch.dtype, torch.dtype] = (_FLOAT32,) * 3,
) -> Any:
    """Returns the ForwardPass (csrc/bindings/structs.h). `stored`: x, a residual without a scale, the float result."""
    row, (x, residual, output) = TABLE[activation], (KINDS[dtype] for dtype in stored)
    return _native.ForwardPass(
        rows=rows,
        channels=channels,
        activation=row.number,
        floor=row.floor,
        ceiling=row.ceiling,
        peak_is_known=row.is_monotone and not has_residual,
        kept=kept,
        pitch=channels if pitch is None else pitch,
        x=x,
        residual=residual,
        output=output,
    )


def residual_dtype(residual: Residual) -> torch.dtype:
    """Returns how the floats of a residual are stored; float32 if it has none."""
    return residual.dtype if isinstance(residual, Tensor) else _FLOAT32


def residual_numbers(residual: Residual, count: int) -> tuple[int, int]:
    """Returns the address of the residual, and that of its scale if it is int8."""
    if residual is None or isinstance(residual, Tensor):
        return last(residual, residual_dtype(residual), count), 0
    values, scale, _, _ = residual
    return last(values, _INT8, count), flat(scale, _FLOAT32, 1)


def place(x: Tensor | None, dtype: torch.dtype, count: int, into: Into | None) -> int:
    """Returns the address that a pass writes to: a tensor of its own, or a slice of a wider one."""
    return last(x, dtype, count) if into is None else part(x, dtype, count, into.pitch)


def _int8_room(size: Sequence[int], strides: Sequence[int], into: Into | None) -> QTensor:
    """Returns empty tensors for an int8 result of this size. `into` has its values if they are part of a wider tensor."""
    values = None if into is None else into.values
    if values is None:
        values = allocator.empty(size, strides, _INT8, CPU)
    return QTensor(values, new((1,) * len(size), _FLOAT32), new(2, _INT64))


def _int8_to(q: QTensor | None, count: int, into: Into | None) -> dict[str, int]:
    """Returns the addresses that an int8 result is written to."""
    if q is None:
        return {"values": 0, "scale": 0, "counts": 0}
    return {"values": place(q.values, _INT8, count, into), "scale": known(q.scale), "counts": known(q.counts)}


def kept_numbers(kept: Kept | None, count: int, channels: int) -> tuple[int, int, int, int]:
    """Returns the numbers of the saved input of a norm: address of the values, kind, addresses of step and centre."""
    if kept is None:
        return 0, 0, 0, 0
    if isinstance(kept, Tensor):
        dtype = kept.dtype
        return last(kept, dtype, count), KINDS[dtype], 0, 0
    values, step, centre = kept
    return last(values, _INT8, count), STORED["int8"], flat(step, _FLOAT32, channels), flat(centre, _FLOAT32, channels)


def _room(x: Tensor, keep: str | None, extremes: Extremes | None) -> Kept | None:
    """Returns empty tensors for x in a smaller form, with its step and centre."""
    if keep is None:
        return None
    if extremes is None:
        return allocator.empty_like(x, torch.bfloat16)
    with torch.no_grad():
        return allocator.empty_like(x, _INT8), norm_step(*extremes), extremes[2]


def normalize_peak(path: int, x: Tensor, a: Tensor, b: Tensor, residual: Residual, activation: str) -> Tensor:
    count, channels = x.numel(), x.shape[1]
    peak, (added, added_scale) = new((), _FLOAT32), residual_numbers(residual, count)
    _native.normalize_peak(
        path,
        forward_pass(count // channels, channels, activation, stored=(x.dtype, residual_dtype(residual), _FLOAT32)),
        x=last(x, x.dtype, count),
        a=flat(a, _FLOAT32, channels),
        b=flat(b, _FLOAT32, channels),
        residual=added,
        residual_scale=added_scale,
        peak=known(peak),
        threads=_threads(),
    )
    return peak


def normalize(
    path: int,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    residual: Residual,
    activation: str,
    clip: Tensor | None,
    want_float: bool,
    want_mask: bool,
    keep: str | None,
    extremes: Extremes | None,
    into: Into | None,
) -> Normalized:
    row, count, channels = TABLE[activation], x.numel(), x.shape[1]
    rows, kept = count // channels, _room(x, keep, extremes)
    q = output = mask = None
    if clip is not None:
        q = _int8_room(x.shape, x.stride(), into)
    if want_float:
        output = allocator.empty_like(x, _FLOAT32) if into is None else into.output
    if want_mask and not row.is_smooth:
        mask = new((rows, (channels + 7) // 8), _UINT8)
    (added, added_scale), (there, kind, step, centre) = residual_numbers(residual, count), kept_numbers(kept, count, channels)
    pitch = None if into is None else into.pitch
    _native.normalize(
        path,
        forward_pass(rows, channels, activation, kind, pitch, stored=(x.dtype, residual_dtype(residual), _FLOAT32)),
        x=last(x, x.dtype, count),
        a=flat(a, _FLOAT32, channels),
        b=flat(b, _FLOAT32, channels),
        residual=added,
        residual_scale=added_scale,
        clip=flat(clip, _FLOAT32, 1),
        **_int8_to(q, count, into),
        output=place(output, _FLOAT32, count, into),
        mask=known(mask),
        kept=there,
        step=step,
        centre=centre,
        threads=_threads(),
    )
    return Normalized(q, output, mask, kept)


def pack_norm(path: int, x: Tensor, keep: str, extremes: Extremes | None) -> Kept:
    count, channels = x.numel(), x.shape[1]
    kept = _room(x, keep, extremes)
    assert kept is not None
    there, kind, step, centre = kept_numbers(kept, count, channels)
    _native.pack_norm(
        path,
        forward_pass(count // channels, channels, "none", kind, stored=(x.dtype, _FLOAT32, _FLOAT32)),
        x=last(x, x.dtype, count),
        kept=there,
        step=step,
        centre=centre,
        threads=_threads(),
    )
    return kept


def conv_normalize(
    path: int,
    call: ProductCall,
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    a: Tensor,
    b: Tensor,
    residual: Residual,
    activation: str,
    clip: Tensor | None,
    want_float: bool,
    into: Into | None,
) -> Normalized:
    """Applies an epilogue (csrc/block/epilogue.h) to tiles of the product in the cache, if the kernel supports it."""
    if call.plan is None:
        return reference.conv_normalize(call, operands, a, b, residual, activation, clip, want_float, into)
    x, w, scales, alive = laid_out(path, call, *operands)
    size, strides = call.size, last_strides(call.size)
    q = output = None
    if clip is not None:
        q = _int8_room(size, strides, into)
    if want_float:
        output = allocator.empty(size, strides, _FLOAT32, CPU) if into is None else into.output
    channels, count = call.channels, math.prod(size)
    (added, added_scale), pitch = residual_numbers(residual, count), None if into is None else into.pitch
    kernel = _native.conv_normalize(
        path,
        call.plan.shape,
        forward_pass(count // channels, channels, activation, 0, pitch, stored=(_FLOAT32, residual_dtype(residual), _FLOAT32)),
        _native.Operands(a=known(x), b=known(w), **scales),
        a=flat(a, _FLOAT32, channels),
        b=flat(b, _FLOAT32, channels),
        residual=added,
        residual_scale=added_scale,
        clip=flat(clip, _FLOAT32, 1),
        **_int8_to(q, count, into),
        output=place(output, _FLOAT32, count, into),
        threads=_threads(),
    )
    del alive  # the scales must exist until here
    if kernel:
        library.last_kernel = kernel
        return Normalized(q, output)
    y = channels_last(run_product(path, call, *operands))
    return normalize(path, y, a, b, residual, activation, clip, want_float, False, None, None, into)


# ---- a norm with batch statistics: several passes in one call --------------------------------------------------------


def normalize_batch(path: int, x: Tensor, norm: BatchNorm, residual: Residual, activation: str, wants: Wants) -> Normalized:
    if not is_writable(norm.running):
        return reference.normalize_batch(x, norm, residual, activation, wants)
    forward, given, to, made, alive = _request(x, norm, residual, activation, wants)
    _native.normalize_batch(path, forward, given, to, _threads())
    del alive
    return made


def conv_normalize_batch(
    path: int,
    call: ProductCall,
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    norm: BatchNorm,
    residual: Residual,
    activation: str,
    wants: Wants,
) -> tuple[Tensor, Normalized]:
    """Computes the statistics of a large output while it is written (csrc/block/epilogue.h), without reading it again."""
    if call.plan is None or not is_writable(norm.running):
        return reference.conv_normalize_batch(call, operands, norm, residual, activation, wants)
    y = allocator.empty(call.size, last_strides(call.size), wants.y, CPU)
    x, w, scales, factors = laid_out(path, call, *operands)
    forward, given, to, made, alive = _request(y, norm, residual, activation, wants)
    product = _native.Operands(a=known(x), b=known(w), **scales)
    library.last_kernel = _native.conv_normalize_batch(path, call.plan.shape, forward, product, given, to, _threads())
    del factors, alive
    return y, made


def _request(
    x: Tensor, norm: BatchNorm, residual: Residual, activation: str, wants: Wants
) -> tuple[Any, Any, Any, Normalized, Tensor]:
    """Returns the pass, its inputs and its outputs for the library; the result, and what must exist until it is filled."""
    row, count, channels = TABLE[activation], x.numel(), x.shape[1]
    is_known = residual is None and row.is_monotone
    rows, width = count // channels, (channels + 7) // 8
    a, b, peak = new(channels, _FLOAT32), new(channels, _FLOAT32), new((), _FLOAT32)
    mean, invstd = new(channels, _FLOAT64), new(channels, _FLOAT64)
    q = _int8_room(x.shape, x.stride(), None) if wants.int8 else None
    output = mask = None
    if wants.float:
        output = allocator.empty_like(x, wants.output)
    if wants.mask and not row.is_smooth:
        mask = allocator.empty((rows, width), (width, 1), _UINT8, CPU)
    kept = _batch_room(x, wants.keep)
    there, kind, step, centre = kept_numbers(kept, count, channels)
    to = _native.BatchMade(
        a=known(a),
        b=known(b),
        mean=known(mean),
        invstd=known(invstd),
        peak=known(peak),
        **_int8_to(q, count, None),
        output=known(output),
        mask=known(mask),
        kept=there,
        step=step,
        centre=centre,
    )
    stored = x.dtype, residual_dtype(residual), wants.output
    forward = forward_pass(rows, channels, activation, kind, None, residual is not None, stored)
    state = NormState(a, b, mean, invstd, peak if is_known or wants.int8 else None)
    result = Normalized(q, output, mask, kept, state)
    return forward, _given(x, norm, residual, count, channels), to, result, peak


def _given(x: Tensor, norm: BatchNorm, residual: Residual, count: int, channels: int) -> Any:
    """Returns the BatchGiven (csrc/bindings/structs.h)."""
    gamma, beta, bias, eps, running, momentum = norm
    mean, var = running or (None, None)
    added, added_scale = residual_numbers(residual, count)
    return _native.BatchGiven(
        x=last(x, x.dtype, count),
        gamma=flat(gamma, _FLOAT32, channels),
        beta=flat(beta, _FLOAT32, channels),
        bias=flat(bias, _FLOAT32, channels),
        running_mean=flat(mean, _FLOAT32, channels),
        running_var=flat(var, _FLOAT32, channels),
        residual=added,
        residual_scale=added_scale,
        eps=eps,
        momentum=momentum,
    )


def _batch_room(x: Tensor, keep: str | None) -> Kept | None:
    """Returns empty tensors for x in a smaller form. The library also computes the step and the centre."""
    if keep is None:
        return None
    if keep == "bfloat16":
        return allocator.empty_like(x, torch.bfloat16)
    channels = x.shape[1]
    return allocator.empty_like(x, _INT8), new(channels, _FLOAT32), new(channels, _FLOAT32)
