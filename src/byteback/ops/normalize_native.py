# SPDX-License-Identifier: Apache-2.0
"""The fused block's passes on the native library: tensors to addresses. Same functions as normalize_reference.py.

Arguments were checked (normalize_checks.py), are not empty, and lie channels last, dense; vectors are dense. `path` is what
native.number() said. These functions run a few hundred times per training step, so they call little but torch.empty and the
last checks on the way to the library (addresses.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback.addresses import flat, known, last, new, part
from byteback.ops import native, pool
from byteback.ops.normalize_reference import Into, Kept, Residual

_library: Any = native.library
_float32, _float64, _int64, _int8, _uint8 = torch.float32, torch.float64, torch.int64, torch.int8, torch.uint8
_GATES = {"none": 0, "relu": 2, "relu6": 3, "hardswish": 4, "silu": 5}  # enum class Gate in csrc/norm.h
_MASK_GATE = 1
_KINDS = {torch.float32: 0, torch.bfloat16: 1}  # enum class Stored
_INT8_KIND = 2


def channel_stats(path: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, channels = x.numel(), x.shape[1]
    total, squares = new(channels, _float64), new(channels, _float64)
    low, high = new(channels, _float32), new(channels, _float32)
    _library.channel_stats(
        path,
        count // channels,
        channels,
        last(x, _float32, count),
        known(total),
        known(squares),
        known(low),
        known(high),
        torch.get_num_threads(),
    )
    return total, squares, low, high


def residual_numbers(residual: Residual, count: int) -> tuple[int, int]:
    """Where the residual lies, and the scale of one that is int8."""
    if residual is None or isinstance(residual, Tensor):
        return last(residual, _float32, count), 0
    values, scale = residual
    return last(values, _int8, count), flat(scale, _float32, 1)


def place(x: Tensor | None, dtype: torch.dtype, count: int, into: Into | None) -> int:
    """Where a pass writes: a tensor of its own, or a part of a wider one."""
    return last(x, dtype, count) if into is None else part(x, dtype, count, into.pitch)


def normalize_peak(path: int, x: Tensor, a: Tensor, b: Tensor, residual: Residual, activation: int) -> Tensor:
    count, channels = x.numel(), x.shape[1]
    peak = new((), _float32)
    _library.normalize_peak(
        path,
        count // channels,
        channels,
        last(x, _float32, count),
        flat(a, _float32, channels),
        flat(b, _float32, channels),
        *residual_numbers(residual, count),
        activation,
        known(peak),
        torch.get_num_threads(),
    )
    return peak


def normalize(
    path: int,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    residual: Residual,
    activation: int,
    clip: Tensor | None,
    want_float: bool,
    want_mask: bool,
    kept: Kept | None,
    into: Into | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Kept | None]:
    """values, scale, output, mask, counts, and `kept`, which is filled."""
    count, channels = x.numel(), x.shape[1]
    rows = count // channels
    values = scale = output = mask = counts = None
    if clip is not None:
        values = pool.empty_like(x, _int8) if into is None else into.values
        scale, counts = new((1,) * x.dim(), _float32), new(2, _int64)
    if want_float:
        output = pool.empty_like(x) if into is None else into.output
    if want_mask:
        mask = new((rows, (channels + 7) // 8), _uint8)
    _library.normalize(
        path,
        rows,
        channels,
        last(x, _float32, count),
        flat(a, _float32, channels),
        flat(b, _float32, channels),
        *residual_numbers(residual, count),
        activation,
        flat(clip, _float32, 1),
        place(values, _int8, count, into),
        known(scale),
        known(counts),
        place(output, _float32, count, into),
        known(mask),
        *kept_numbers(kept, count, channels),
        channels if into is None else into.pitch,
        torch.get_num_threads(),
    )
    return values, scale, output, mask, counts, kept


def kept_numbers(kept: Kept | None, count: int, channels: int) -> tuple[int, int, int, int]:
    """Where BatchNorm's input is kept: values, kind, step, centre."""
    if kept is None:
        return 0, 0, 0, 0
    if isinstance(kept, Tensor):
        dtype = kept.dtype
        return last(kept, dtype, count), _KINDS[dtype], 0, 0
    values, step, centre = kept
    return last(values, _int8, count), _INT8_KIND, flat(step, _float32, channels), flat(centre, _float32, channels)


def pack_norm(path: int, x: Tensor, kept: Kept) -> None:
    count, channels = x.numel(), x.shape[1]
    numbers = kept_numbers(kept, count, channels)
    _library.pack_norm(path, count // channels, channels, last(x, _float32, count), *numbers, torch.get_num_threads())


def backward_numbers(
    g: Tensor,
    x: Kept,
    a: Tensor | None,
    b: Tensor | None,
    mask: Tensor | None,
    activation: str,
    p: Tensor | None = None,
    q: Tensor | None = None,
    r: Tensor | None = None,
) -> list[int]:
    """BackwardNumbers of csrc/bindings_norm.cpp. The caller keeps the tensors alive."""
    count, channels = g.numel(), g.shape[1]
    rows, gate = count // channels, _GATES[activation]
    return [
        rows,
        channels,
        last(g, _float32, count),
        *kept_numbers(x, count, channels),
        flat(a, _float32, channels),
        flat(b, _float32, channels),
        flat(mask, _uint8, rows * ((channels + 7) // 8)),
        gate if mask is None or gate >= _GATES["hardswish"] else _MASK_GATE,
        flat(p, _float32, channels),
        flat(q, _float32, channels),
        flat(r, _float32, channels),
    ]


def normalize_grad_sums(
    path: int, g: Tensor, numbers: list[int], want_masked: bool, want_squares: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    channels = g.shape[1]
    total, dot = new(channels, _float64), new(channels, _float64)
    squares = new(channels, _float64) if want_squares else None
    masked = pool.empty_like(g) if want_masked else None
    _library.normalize_grad_sums(
        path,
        numbers,
        known(total),
        known(dot),
        known(squares),
        known(masked),
        torch.get_num_threads(),
    )
    return total, dot, squares, masked


def normalize_grad(path: int, g: Tensor, numbers: list[int]) -> Tensor:
    dx = pool.empty_like(g)
    _library.normalize_grad(path, numbers, known(dx), torch.get_num_threads())
    return dx


def normalize_grad_quantize(
    path: int, g: Tensor, numbers: list[int], clip: Tensor, key: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, scale, counts, peak = pool.empty_like(g, _int8), new((1,) * g.dim(), _float32), new(2, _int64), new((), _float32)
    _library.normalize_grad_quantize(
        path,
        numbers,
        flat(clip, _float32, 1),
        flat(key, _int64, 2),
        known(values),
        known(scale),
        known(counts),
        known(peak),
        torch.get_num_threads(),
    )
    return values, scale, counts, peak
