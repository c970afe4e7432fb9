# SPDX-License-Identifier: Apache-2.0
"""The forward passes of a fused block on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback.ops.activations import TABLE
from byteback.ops.backends import reference
from byteback.ops.backends.triton import packing, products
from byteback.ops.backends.triton.kernels import norm as kernels
from byteback.ops.backends.triton.launch import blocks, fits, launch, power_of_two
from byteback.ops.backends.triton.norm import norm_coefficients
from byteback.ops.backends.triton.quantize import new_counts
from byteback.ops.backends.triton.statistics import channel_stats
from byteback.ops.backends.triton.tiles import height
from byteback.ops.contract.layout import channels_last, last_strides
from byteback.ops.types import BatchNorm, Extremes, Into, Kept, Normalized, NormState, ProductCall, QTensor, Residual, Wants


def rows_and_tile(x: Tensor) -> tuple[int, int, dict[str, int]]:
    """Returns the pixels and channels of (N, C, ...), and the tile of a pass over them."""
    c = x.shape[1]
    width = power_of_two(c, 8, 64)
    rows = x.numel() // c
    return rows, c, {"BR": height(rows, width, x.device), "BC": width}


def pass_over(x: Tensor, packs: bool) -> tuple[int, int, dict[str, int], tuple[int, int]]:
    """Returns rows_and_tile and the grid of a pass, which may write a packed copy of its integers."""
    rows, c, tile = rows_and_tile(x)
    images, pixels = x.shape[0], rows // x.shape[0]
    if packs:
        tile["BR"] = packing.height(pixels, tile["BC"], x.device)
    return rows, c, tile, (packing.grid_of(images, pixels, tile["BR"], packs), blocks(c, tile["BC"]))


def empty_last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an empty channels-last tensor of the sizes of x."""
    return torch.empty_strided(x.shape, last_strides(x.shape), dtype=dtype, device=x.device)


def _bits(x: Tensor | None) -> Tensor | None:
    """Returns a tensor that a kernel writes to: of bfloat16 the bits."""
    return x.view(torch.int16) if x is not None and x.dtype is torch.bfloat16 else x


def _pass(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    residual: Residual,
    activation: str,
    *,
    clip: Tensor | None = None,
    output: Tensor | None = None,
    values: Tensor | None = None,
    mask: Tensor | None = None,
    peak: Tensor | None = None,
    kept: Kept | None = None,
    pitch: int = 0,
    packed: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Runs the pass and writes to the given tensors. Returns the scale and the counts of the integers."""
    rows, c, tile, grid = pass_over(x, packed is not None)
    added, added_scale, kind = (x, a, 0)
    if isinstance(residual, QTensor):
        added, added_scale, kind = (residual.values, residual.scale, 2)
    elif residual is not None:
        added, kind = residual, 1
    scale = counts = None
    if clip is not None:
        scale, counts = clip.new_empty((1,) * x.dim()), new_counts(x)[0]
    keeps = (_bits(kept), None, None) if isinstance(kept, Tensor) else kept or (None, None, None)
    given: list[Any] = [clip, values, packed, scale, _bits(output), mask, counts, peak, *keeps]
    launch(
        kernels.normalize,
        grid,
        *(x, a, b, added, added_scale, *(x if tensor is None else tensor for tensor in given)),
        *(rows, rows // x.shape[0], c, pitch or c, (c + 7) // 8),
        RESIDUAL=kind,
        ACT=TABLE[activation].number,
        INT8=values is not None,
        FLOAT=output is not None,
        MASK=mask is not None,
        PEAK=peak is not None,
        ROUNDS=output is not None and output.dtype is torch.bfloat16,
        KEEP=0 if kept is None else 2 if isinstance(kept, Tensor) else 1,
        PACKS=packed is not None,
        warps=4 if packed is None else 8,  # with 4, sm_100 would spill registers
        **tile,
    )
    return scale, counts


@torch.no_grad()
def normalize_peak(x: Tensor, a: Tensor, b: Tensor, residual: Residual, activation: str) -> Tensor:
    if not fits(x):
        return reference.normalize_peak(x, a, b, residual, activation)
    peak = torch.zeros((), dtype=torch.int32, device=x.device)
    _pass(x, a, b, residual, activation, peak=peak)
    return peak.view(torch.float32)


@torch.no_grad()
def normalize(
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
    packs: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Normalized:
    places = (None, None, 0) if into is None else into
    if not fits(x) or places[2] * x.numel() // max(x.shape[1], 1) >= 2**31:
        return reference.normalize(x, a, b, residual, activation, clip, want_float, want_mask, keep, extremes, into)
    output = values = mask = around = None
    if want_float:
        output = empty_last(x, dtype) if places[1] is None else places[1]
    if clip is not None:
        values = empty_last(x, torch.int8) if places[0] is None else places[0]
    if want_mask and not TABLE[activation].is_smooth:
        mask = torch.empty((x.numel() // x.shape[1], (x.shape[1] + 7) // 8), dtype=torch.uint8, device=x.device)
    kept: Kept | None = None
    if keep is not None and extremes is None:
        kept = empty_last(x, torch.bfloat16)
    elif extremes is not None:
        kept = around = empty_last(x, torch.int8), _keep_step(extremes), extremes[2]
    pitch = 0
    for place, whole in ((places[0], values), (places[1], output)):
        pitch = places[2] if place is not None and whole is not None else pitch
    if (
        pitch
        and pitch != x.shape[1]
        and (values is None) == (output is None)
        and not (places[0] is not None and places[1] is not None)
    ):
        return reference.normalize(x, a, b, residual, activation, clip, want_float, want_mask, keep, extremes, into)
    stored = kept if around is None else (around[0], around[2], around[1])
    packed = packing.new_packed(x, packs and values is not None and into is None)
    made: dict[str, Any] = {"clip": clip, "output": output, "values": values, "mask": mask, "kept": stored}
    scale, counts = _pass(x, a, b, residual, activation, **made, pitch=pitch, packed=packed)
    q = None if values is None or scale is None else packing.with_packed(QTensor(values, scale, counts), packed)
    return Normalized(q, output, mask, kept)


def _keep_step(extremes: Extremes) -> Tensor:
    low, high, centre = extremes
    step = torch.empty_like(centre)
    launch(kernels.keep_step, (blocks(step.numel(), 128),), low, high, centre, step, step.numel(), BC=128)
    return step


@torch.no_grad()
def pack_norm(x: Tensor, keep: str, extremes: Extremes | None) -> Kept:
    if keep != "bfloat16" or x.dtype is not torch.float32 or not fits(x):
        return reference.pack_norm(x, keep, extremes)
    x = channels_last(x)
    kept, count = empty_last(x, torch.bfloat16), x.numel()
    launch(kernels.rounded, (blocks(count, 1024),), x, _bits(kept), count, B=1024)
    return kept


@torch.no_grad()
def normalize_batch(x: Tensor, norm: BatchNorm, residual: Residual, activation: str, wants: Wants) -> Normalized:
    is_known = residual is None and TABLE[activation].is_monotone
    stats, count = channel_stats(x), x.numel() // max(x.shape[1], 1)
    a, b, mean, invstd, peak = norm_coefficients(stats, count, norm, activation)
    if wants.int8 and not is_known:
        peak = normalize_peak(x, a, b, residual, activation)
    made = Normalized()
    if any(wants[:4]):
        clip = peak if wants.int8 else None
        extremes = (stats[2], stats[3], mean.float()) if wants.keep == "int8" else None
        which = clip, wants.float, wants.mask, wants.keep, extremes, None, wants.packed, wants.output
        made = normalize(x, a, b, residual, activation, *which)
    return made._replace(norm=NormState(a, b, mean, invstd, peak if is_known or wants.int8 else None))


def conv_normalize(
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
    y = channels_last(products.product(call, *operands))
    return normalize(y, a, b, residual, activation, clip, want_float, False, None, None, into)


def conv_normalize_batch(
    call: ProductCall,
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    norm: BatchNorm,
    residual: Residual,
    activation: str,
    wants: Wants,
) -> tuple[Tensor, Normalized]:
    y = channels_last(products.product_as(wants.y, call, *operands))
    return y, normalize_batch(y, norm, residual, activation, wants)
