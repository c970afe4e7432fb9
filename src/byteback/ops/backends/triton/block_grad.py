# SPDX-License-Identifier: Apache-2.0
"""The backward passes of a fused block on a GPU. The gradient g is float32 or bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback.ops.activations import MASK_GATE, TABLE
from byteback.ops.backends import reference
from byteback.ops.backends.reference.block_grad import masked_dtype
from byteback.ops.backends.triton import packing
from byteback.ops.backends.triton.block import empty_last, pass_over, rows_and_tile
from byteback.ops.backends.triton.kernels import norm_grad as kernels
from byteback.ops.backends.triton.launch import blocks, fits, launch
from byteback.ops.backends.triton.quantize import new_counts
from byteback.ops.backends.triton.statistics import fold, new_part, sums_grid, tile
from byteback.ops.contract.layout import channels_last
from byteback.ops.types import GradientParts, GradSums, Kept, NormGradient, QTensor


def _gate(mask: Tensor | None, activation: str) -> int:
    row = TABLE[activation]
    return row.gate if mask is None or row.is_smooth else MASK_GATE


def _saved(x: Kept, fill: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """Returns the saved input of a norm as three tensors, and the number of its form."""
    if isinstance(x, tuple):
        return x, 2
    return (x, fill, fill), int(x.dtype == torch.bfloat16)


@torch.no_grad()
def add_waiting(x: Tensor, g: Tensor, mask: Tensor | None) -> Tensor:
    if not fits(g):
        return reference.add_waiting(x, g, mask)
    out = empty_last(g, torch.float32)
    rows, c, size = rows_and_tile(g)
    grid = blocks(rows, size["BR"]), blocks(c, size["BC"])
    tensors = channels_last(x), channels_last(g), g if mask is None else mask, out
    launch(kernels.waiting, grid, *tensors, rows, c, (c + 7) // 8, GATE=_gate(mask, "none"), **size)
    return out


@torch.no_grad()
def normalize_grad_sums(
    g: Tensor,
    x: Kept,
    a: Tensor | None,
    b: Tensor | None,
    mask: Tensor | None,
    activation: str,
    want_masked: bool,
    want_squares: bool,
) -> GradSums:
    if not fits(g):
        return reference.normalize_grad_sums(g, x, a, b, mask, activation, want_masked, want_squares)
    c = g.shape[1]
    rows = g.numel() // c
    part, apart = new_part(g, 3, rows, c)
    dtype = masked_dtype(g, activation)
    masked = empty_last(g, dtype) if want_masked else None
    rounds = dtype is torch.bfloat16
    saved, kind = _saved(x, g)
    written = masked.view(torch.int16) if masked is not None and rounds else masked
    given = [g if tensor is None else tensor for tensor in (a, b, mask, written)]
    sizes = (rows, c, (c + 7) // 8, apart)
    flags = {"KEPT": kind, "GATE": _gate(mask, activation), "STORE": 1 + rounds if want_masked else 0}
    launch(kernels.sums, sums_grid(g), g, *saved, *given, part, *sizes, **flags, **tile(g))
    total, dot, squares = fold(part)
    return GradSums(total, dot, squares if want_squares else None, masked)


def run_gradient(
    parts: GradientParts,
    *,
    out: Tensor | None = None,
    one: tuple[Tensor, ...] | None = None,
    each: tuple[Tensor, ...] | None = None,
    peak: Tensor | None = None,
    tails: tuple[Tensor, ...] | None = None,
    key: Tensor | None = None,
    when: Tensor | None = None,
    packed: Tensor | None = None,
) -> None:
    """Runs one pass over dx and writes what is given: floats, values with clip, scale and counts, the maximum, tails, and a
    packed copy of `each`, or of `one`."""
    g, x, a, b, mask, activation, p, q, r = parts
    rows, c, size, grid = pass_over(g, packed is not None)
    saved, kind = _saved(x, g)

    def known(tensors: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        return (g,) * 4 if tensors is None else tensors

    given = [g if tensor is None else tensor for tensor in (a, b, mask)]
    places: list[Any] = [g if out is None else out, *known(one), *known(each), g if peak is None else peak, *known(tails)]
    places += [g if tensor is None else tensor for tensor in (key, when, packed)]
    launch(
        kernels.gradient,
        grid,
        *(g, *saved, *given, p, q, r, *places),
        *(rows, rows // g.shape[0], c, (c + 7) // 8),
        KEPT=kind,
        GATE=_gate(mask, activation),
        FLOAT=out is not None,
        ONE=one is not None,
        EACH=each is not None,
        TAILS=tails is not None,
        PEAK=0 if peak is None else 1 if peak.numel() == 1 and peak.dim() == 0 else 2,
        NOISE=key is not None,
        IF=when is not None,
        PACKS=packed is not None,
        **size,
    )


@torch.no_grad()
def normalize_grad(parts: GradientParts) -> Tensor:
    if not fits(parts.g):
        return reference.normalize_grad(parts)
    dx = empty_last(parts.g, torch.float32)
    run_gradient(parts, out=dx)
    return dx


def new_copy(g: Tensor, clip: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns empty values, the clip, an empty scale, and counts and peak, which are 0."""
    counts, peak = new_counts(g)
    scale = torch.empty((1, clip.numel(), *(1,) * (g.dim() - 2)), dtype=torch.float32, device=g.device)
    return empty_last(g, torch.int8), clip.reshape(-1).contiguous(), scale, counts, peak


def _copied(copy: list[Tensor], peak: Tensor) -> QTensor:
    values, _, scale, counts = copy
    return QTensor(values, scale, counts, peak.view(torch.float32))


@torch.no_grad()
def normalize_grad_quantize(parts: GradientParts, clip: Tensor, key: Tensor | None) -> QTensor:
    if not fits(parts.g):
        return reference.normalize_grad_quantize(parts, clip, key)
    *copy, peak = new_copy(parts.g, clip)
    run_gradient(parts, one=tuple(copy), peak=peak, key=key)
    return _copied(copy, peak)


@torch.no_grad()
def normalize_grad_quantize_pair(
    parts: GradientParts, clip: Tensor, clip_per_channel: Tensor, key: Tensor | None, packs: bool = False
) -> tuple[QTensor, QTensor]:
    if not fits(parts.g):
        return reference.normalize_grad_quantize_pair(parts, clip, clip_per_channel, key)
    *one, peak = new_copy(parts.g, clip)
    *each, _ = new_copy(parts.g, clip_per_channel)
    packed = packing.new_packed(parts.g, packs)
    run_gradient(parts, one=tuple(one), each=tuple(each), peak=peak, key=key, packed=packed)
    return _copied(one, peak), packing.with_packed(_copied(each, peak), packed)


@torch.no_grad()
def normalize_grad_quantize_by_ratio(parts: GradientParts, ratio: float | Tensor, key: Tensor | None) -> tuple[Tensor, QTensor]:
    if not fits(parts.g):
        return reference.normalize_grad_quantize_by_ratio(parts, ratio, key)  # type: ignore[arg-type]
    clip = channel_peaks(parts) * ratio
    *copy, peak = new_copy(parts.g, clip)
    run_gradient(parts, each=tuple(copy), peak=peak, key=key)
    return clip, _copied(copy, peak)


def _channel_bits(g: Tensor) -> Tensor:
    return torch.zeros((1, g.shape[1], *(1,) * (g.dim() - 2)), dtype=torch.int32, device=g.device)


def channel_peaks(parts: GradientParts) -> Tensor:
    """Returns max|dx| of each channel, (1, C, 1, ...)."""
    bits = _channel_bits(parts.g)
    run_gradient(parts, peak=bits)
    return bits.view(torch.float32)


@torch.no_grad()
def normalize_grad_tails(parts: GradientParts, per_channel: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not fits(parts.g):
        return reference.normalize_grad_tails(parts, per_channel, threshold)
    g, bits = parts.g, _channel_bits(parts.g)
    counts = torch.zeros((2, *bits.shape), dtype=torch.int64, device=g.device)
    run_gradient(parts, peak=bits, tails=(counts[0], counts[1], per_channel.contiguous(), threshold.contiguous()))
    return bits.view(torch.float32), counts[0], counts[1]


def normalize_grad_batch(
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
    seen = normalize_grad_sums(g, x, a, b, mask, activation, want_masked, want_sums)
    count = g.numel() // max(g.shape[1], 1)
    q, r, gamma, beta = reference.norm_gradient(a, mean, invstd, seen.total, seen.dot, count)
    sums = None
    if seen.squares is not None:
        sums = reference.gradient_sums(a, q, r, mean, invstd, eps, seen.total, seen.dot, seen.squares, count)
    return NormGradient(q, r, gamma, beta, seen.masked, sums)
