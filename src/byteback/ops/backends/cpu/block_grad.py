# SPDX-License-Identifier: Apache-2.0
"""The backward passes of a fused block in the native library, and what two int8 copies of its gradient need.

Tensors are channels last and dense, vectors are dense, none is empty.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback.ops.activations import MASK_GATE, TABLE
from byteback.ops.backends.cpu import allocator, library
from byteback.ops.backends.cpu.addresses import KINDS, flat, known, last, new
from byteback.ops.backends.cpu.block import kept_numbers
from byteback.ops.backends.cpu.quantize import pair_room, quantized_to, room
from byteback.ops.backends.reference.block_grad import masked_dtype
from byteback.ops.types import GradientParts, GradSums, Kept, NormGradient, QTensor

_native: Any = library.native
# Bound once: after a large layer every attribute look-up in torch is a cache miss.
_threads = torch.get_num_threads
_FLOAT32, _FLOAT64, _INT64, _INT8, _UINT8 = torch.float32, torch.float64, torch.int64, torch.int8, torch.uint8


def backward_of(
    g: Tensor,
    x: Kept,
    a: Tensor | None,
    b: Tensor | None,
    mask: Tensor | None,
    activation: str,
    p: Tensor | None = None,
    q: Tensor | None = None,
    r: Tensor | None = None,
) -> Any:
    """Returns the Backward (csrc/block/norm.h). The caller keeps the tensors alive."""
    row, count, channels = TABLE[activation], g.numel(), g.shape[1]
    rows, (there, kind, step, centre) = count // channels, kept_numbers(x, count, channels)
    return _native.Backward(
        rows=rows,
        channels=channels,
        gate=row.gate if mask is None or row.is_smooth else MASK_GATE,
        kept=kind,
        g_kind=KINDS[g.dtype],
        g=last(g, g.dtype, count),
        x=there,
        step=step,
        centre=centre,
        a=flat(a, _FLOAT32, channels),
        b=flat(b, _FLOAT32, channels),
        mask=flat(mask, _UINT8, rows * ((channels + 7) // 8)),
        p=flat(p, _FLOAT32, channels),
        q=flat(q, _FLOAT32, channels),
        r=flat(r, _FLOAT32, channels),
    )


def normalize_grad_sums(
    path: int,
    g: Tensor,
    x: Kept,
    a: Tensor | None,
    b: Tensor | None,
    mask: Tensor | None,
    activation: str,
    want_masked: bool,
    want_squares: bool,
) -> GradSums:
    channels = g.shape[1]
    total, dot = new(channels, _FLOAT64), new(channels, _FLOAT64)
    squares = new(channels, _FLOAT64) if want_squares else None
    masked = allocator.empty_like(g, masked_dtype(g, activation)) if want_masked else None
    _native.normalize_grad_sums(
        path,
        backward_of(g, x, a, b, mask, activation),
        total=known(total),
        dot=known(dot),
        squares=known(squares),
        masked=known(masked),
        threads=_threads(),
    )
    return GradSums(total, dot, squares, masked)


def normalize_grad(path: int, parts: GradientParts) -> Tensor:
    dx = allocator.empty_like(parts.g)
    _native.normalize_grad(path, backward_of(*parts), dx=known(dx), threads=_threads())
    return dx


def add_waiting(path: int, x: Tensor, g: Tensor, mask: Tensor | None) -> Tensor:
    dx, count, channels = allocator.empty_like(x), x.numel(), x.shape[1]
    rows = count // channels
    _native.add_waiting(
        path,
        rows=rows,
        channels=channels,
        g_kind=KINDS[g.dtype],
        g=last(g, g.dtype, count),
        mask=flat(mask, _UINT8, rows * ((channels + 7) // 8)),
        x=last(x, _FLOAT32, count),
        dx=known(dx),
        threads=_threads(),
    )
    return dx


def normalize_grad_quantize(path: int, parts: GradientParts, clip: Tensor, key: Tensor | None) -> QTensor:
    g = parts.g
    values, scale, counts, peak = made = room(g, (1,) * g.dim())
    _native.normalize_grad_quantize(
        path,
        backward_of(*parts),
        clip=flat(clip, _FLOAT32, 1),
        key=flat(key, _INT64, 2),
        values=known(values),
        scale=known(scale),
        counts=known(counts),
        peak=known(peak),
        threads=_threads(),
    )
    return made


def normalize_grad_batch(
    path: int,
    g: Tensor,
    x: Kept,
    a: Tensor,
    b: Tensor | None,
    mask: Tensor | None,
    activation: str,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
    want_masked: bool,
    want_sums: bool,
) -> NormGradient:
    channels, gate_a = g.shape[1], None if b is None else a
    masked = allocator.empty_like(g, masked_dtype(g, activation)) if want_masked else None
    q, r, gamma, beta = (new(channels, _FLOAT32) for _ in range(4))
    sums = (new(channels, _FLOAT64), new(channels, _FLOAT64)) if want_sums else None
    dx_total, dx_squares = sums or (None, None)
    _native.normalize_grad_batch(
        path,
        backward_of(g, x, gate_a, b, mask, activation),
        eps=eps,
        a=flat(a, _FLOAT32, channels),
        mean=flat(mean, _FLOAT64, channels),
        invstd=flat(invstd, _FLOAT64, channels),
        q=known(q),
        r=known(r),
        grad_gamma=known(gamma),
        grad_beta=known(beta),
        masked=known(masked),
        dx_total=known(dx_total),
        dx_squares=known(dx_squares),
        threads=_threads(),
    )
    return NormGradient(q, r, gamma, beta, masked, sums)


def _column(g: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an empty tensor with one number per channel, (1, C, 1, ...)."""
    return new((1, g.shape[1], *(1,) * (g.dim() - 2)), dtype)


def normalize_grad_tails(
    path: int, parts: GradientParts, per_channel: Tensor, threshold: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    g = parts.g
    peak, over_each, over_all = _column(g, _FLOAT32), _column(g, _INT64), _column(g, _INT64)
    _native.normalize_grad_tails(
        path,
        backward_of(*parts),
        each=flat(per_channel, _FLOAT32, g.shape[1]),
        all=flat(threshold, _FLOAT32, 1),
        peak=known(peak),
        over_each=known(over_each),
        over_all=known(over_all),
        threads=_threads(),
    )
    return peak, over_each, over_all


def normalize_grad_quantize_pair(
    path: int, parts: GradientParts, clip: Tensor, clip_per_channel: Tensor, key: Tensor | None
) -> tuple[QTensor, QTensor]:
    by_tensor, by_channel = pair_room(parts.g)
    _native.normalize_grad_quantize_pair(
        path,
        backward_of(*parts),
        quantized_to(by_tensor),
        quantized_to(by_channel),
        clip=flat(clip, _FLOAT32, 1),
        clips=flat(clip_per_channel, _FLOAT32, parts.g.shape[1]),
        key=flat(key, _INT64, 2),
        threads=_threads(),
    )
    return by_tensor, by_channel


def normalize_grad_quantize_by_ratio(
    path: int, parts: GradientParts, ratio: float, key: Tensor | None
) -> tuple[Tensor, QTensor]:
    g = parts.g
    clip = _column(g, _FLOAT32)
    made = room(g, clip.shape)
    _native.normalize_grad_quantize_by_ratio(
        path,
        backward_of(*parts),
        quantized_to(made),
        ratio=ratio,
        key=flat(key, _INT64, 2),
        clips=known(clip),
        threads=_threads(),
    )
    return clip, made
