# SPDX-License-Identifier: Apache-2.0
"""The fused block's passes on the native library: tensors to addresses. Same functions as normalize_reference.py.

Arguments were checked (normalize.py), are not empty, and lie channels last, dense; vectors are dense. `path` is what
native.number() said. These functions run a few hundred times per training step, so they call little but torch.empty.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback.ops import native, pool
from byteback.ops.normalize_reference import Into, Kept, Residual

_library: Any = native.library
_GATES = {"none": 0, "relu": 2, "relu6": 3, "hardswish": 4, "silu": 5}  # enum class Gate in csrc/norm.h
_MASK_GATE = 1
_KINDS = {torch.float32: 0, torch.bfloat16: 1}  # enum class Stored
_INT8_KIND = 2


def _float64(channels: int) -> Tensor:
    return torch.empty(channels, dtype=torch.float64)


def _scalar() -> Tensor:
    return torch.empty((), dtype=torch.float32)


def channel_stats(path: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    channels = x.shape[1]
    total, squares = _float64(channels), _float64(channels)
    low, high = torch.empty(channels, dtype=torch.float32), torch.empty(channels, dtype=torch.float32)
    _library.channel_stats(
        path,
        x.numel() // channels,
        channels,
        x.data_ptr(),
        total.data_ptr(),
        squares.data_ptr(),
        low.data_ptr(),
        high.data_ptr(),
        torch.get_num_threads(),
    )
    return total, squares, low, high


def residual_numbers(residual: Residual) -> tuple[int, int]:
    """Where the residual lies, and the scale of one that is int8."""
    if residual is None:
        return 0, 0
    return (residual.data_ptr(), 0) if isinstance(residual, Tensor) else (residual[0].data_ptr(), residual[1].data_ptr())


def normalize_peak(path: int, x: Tensor, a: Tensor, b: Tensor, residual: Residual, activation: int) -> Tensor:
    channels = x.shape[1]
    peak = _scalar()
    _library.normalize_peak(
        path,
        x.numel() // channels,
        channels,
        x.data_ptr(),
        a.data_ptr(),
        b.data_ptr(),
        *residual_numbers(residual),
        activation,
        peak.data_ptr(),
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
    channels = x.shape[1]
    rows = x.numel() // channels
    values = scale = output = mask = counts = None
    if clip is not None:
        values = pool.empty_like(x, torch.int8) if into is None else into.values
        scale, counts = torch.empty((1,) * x.dim(), dtype=torch.float32), torch.empty(2, dtype=torch.int64)
    if want_float:
        output = pool.empty_like(x) if into is None else into.output
    if want_mask:
        mask = torch.empty(rows, (channels + 7) // 8, dtype=torch.uint8)
    _library.normalize(
        path,
        rows,
        channels,
        x.data_ptr(),
        a.data_ptr(),
        b.data_ptr(),
        *residual_numbers(residual),
        activation,
        0 if clip is None else clip.data_ptr(),
        0 if values is None else values.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        0 if counts is None else counts.data_ptr(),
        0 if output is None else output.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        *kept_numbers(kept),
        channels if into is None else into.pitch,
        torch.get_num_threads(),
    )
    return values, scale, output, mask, counts, kept


def kept_numbers(kept: Kept | None) -> tuple[int, int, int, int]:
    """Where BatchNorm's input is kept: values, kind, step, centre."""
    if kept is None:
        return 0, 0, 0, 0
    if isinstance(kept, Tensor):
        return kept.data_ptr(), _KINDS[kept.dtype], 0, 0
    return kept[0].data_ptr(), _INT8_KIND, kept[1].data_ptr(), kept[2].data_ptr()


def pack_norm(path: int, x: Tensor, kept: Kept) -> None:
    channels = x.shape[1]
    numbers = kept_numbers(kept)
    _library.pack_norm(path, x.numel() // channels, channels, x.data_ptr(), *numbers, torch.get_num_threads())


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
    channels = g.shape[1]
    gate = _GATES[activation]
    return [
        g.numel() // channels,
        channels,
        g.data_ptr(),
        *kept_numbers(x),
        0 if a is None else a.data_ptr(),
        0 if b is None else b.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        gate if mask is None or gate >= _GATES["hardswish"] else _MASK_GATE,
        0 if p is None else p.data_ptr(),
        0 if q is None else q.data_ptr(),
        0 if r is None else r.data_ptr(),
    ]


def normalize_grad_sums(
    path: int, g: Tensor, numbers: list[int], want_masked: bool, want_squares: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    total, dot = _float64(g.shape[1]), _float64(g.shape[1])
    squares = _float64(g.shape[1]) if want_squares else None
    masked = pool.empty_like(g) if want_masked else None
    _library.normalize_grad_sums(
        path,
        numbers,
        total.data_ptr(),
        dot.data_ptr(),
        0 if squares is None else squares.data_ptr(),
        0 if masked is None else masked.data_ptr(),
        torch.get_num_threads(),
    )
    return total, dot, squares, masked


def normalize_grad(path: int, g: Tensor, numbers: list[int]) -> Tensor:
    dx = pool.empty_like(g)
    _library.normalize_grad(path, numbers, dx.data_ptr(), torch.get_num_threads())
    return dx


def normalize_grad_quantize(
    path: int, g: Tensor, numbers: list[int], clip: Tensor, key: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, scale = pool.empty_like(g, torch.int8), torch.empty((1,) * g.dim(), dtype=torch.float32)
    counts, peak = torch.empty(2, dtype=torch.int64), _scalar()
    _library.normalize_grad_quantize(
        path,
        numbers,
        clip.data_ptr(),
        0 if key is None else key.data_ptr(),
        values.data_ptr(),
        scale.data_ptr(),
        counts.data_ptr(),
        peak.data_ptr(),
        torch.get_num_threads(),
    )
    return values, scale, counts, peak
