# SPDX-License-Identifier: Apache-2.0
"""Quantize on a GPU: one pass that writes integers and counts saturated and non-finite values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from byteback.ops.backends import reference
from byteback.ops.backends.triton import packing
from byteback.ops.backends.triton.kernels import quantize as kernels
from byteback.ops.backends.triton.launch import blocks, fits, launch, power_of_two
from byteback.ops.backends.triton.tiles import height
from byteback.ops.contract import layout
from byteback.ops.types import QTensor


class Laid(NamedTuple):
    """A tensor as (N, P, C), with its strides and the tile that reads it in order."""

    x: Tensor
    sizes: tuple[int, int, int]
    strides: tuple[int, int, int]
    tile: tuple[int, int]
    packed: Tensor | None = None  # memory for the packed copy of the integers

    def grid(self) -> tuple[int, int]:
        n, p, c = self.sizes
        return packing.grid_of(n, p, self.tile[0], self.packed is not None), blocks(c, self.tile[1])

    def constants(self) -> dict[str, int]:
        return {"BR": self.tile[0], "BC": self.tile[1]}


def laid(x: Tensor, packs: bool = False) -> Laid:
    """Returns a dense tensor of two or more axes; a copy if x is neither channels last nor contiguous.

    `packs` requests memory for a packed copy, which only a channels-last tensor gets: the packed one is read as such.
    """
    n, c = x.shape[:2]
    p = x.numel() // (n * c)
    if layout.is_last_dense(x.shape, x.stride()):
        width = power_of_two(c, 4, 64)
        packed = packing.new_packed(x, packs)
        tall = height(n * p, width, x.device) if packed is None else packing.height(p, width, x.device)
        return Laid(x, (n, p, c), (p * c, c, 1), (tall, width), packed)
    x = x.contiguous()
    tall = power_of_two(p, 4, 256)
    return Laid(x, (n, p, c), (p * c, 1, p), (tall, height(c, tall, x.device)))


def _varies(clip: Tensor) -> int | None:
    """Returns how a clip varies: 0 not, 1 along axis 1, 2 along axis 0; None in another way."""
    if clip.numel() == 1:
        return 0
    varying = [axis for axis, size in enumerate(clip.shape) if size != 1]
    return {0: 2, 1: 1}.get(varying[0]) if len(varying) == 1 else None


def quantize(x: Tensor, clip: Tensor, key: Tensor | None) -> QTensor:
    return quantize_packing(x, clip, key, False)


@torch.no_grad()
def quantize_packing(x: Tensor, clip: Tensor, key: Tensor | None, packs: bool) -> QTensor:
    """quantize; with `packs` also a packed copy of the integers, where it pays."""
    by = _varies(clip)
    if x.dim() < 2 or by is None or not fits(x):
        return reference.quantize(x, clip, key)
    source = laid(x, packs)
    q = torch.empty_like(source.x, dtype=torch.int8)
    scale = torch.empty_like(clip, memory_format=torch.contiguous_format)
    counts, peak = new_counts(x)
    quantize_into(source, clip.contiguous(), by, key, q, scale, counts, peak)
    if source.x is not x:
        q = torch.empty_like(x, dtype=torch.int8).copy_(q)
    return packing.with_packed(QTensor(q, scale, counts, peak.view(torch.float32)), source.packed)


def new_counts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two int64 counts and the int32 bits of a maximum, all 0."""
    memory = torch.zeros(3, dtype=torch.int64, device=x.device)
    return memory[:2], memory[2:].view(torch.int32)[0]


def quantize_into(
    source: Laid,
    clip: Tensor,
    by: int,
    key: Tensor | None,
    q: Tensor,
    scale: Tensor,
    counts: Tensor,
    peak: Tensor,
    when: Tensor | None = None,
) -> None:
    """Quantizes into given tensors; with `when`, only if that number is not 0."""
    launch(
        kernels.quantize,
        source.grid(),
        *(
            source.x,
            q,
            q if source.packed is None else source.packed,
            clip,
            scale,
            counts if key is None else key,
            counts,
            peak,
            counts if when is None else when,
        ),
        *(*source.sizes, *source.strides),
        BY=by,
        NOISE=key is not None,
        IF=when is not None,
        PACKS=source.packed is not None,
        **source.constants(),
    )


def quantize_plan(x: Tensor, axis: int) -> tuple[()]:
    return ()


@torch.no_grad()
def quantize_max(plan: tuple[()], x: Tensor, axis: int, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    clip = absmax(x, axis)
    q = quantize(x, clip, key)
    assert q.counts is not None
    return q.values, q.scale, clip, q.counts


def quantize_pair(
    x: Tensor, clip: Tensor, clip_per_channel: Tensor, key: Tensor | None, packs: bool = False
) -> tuple[QTensor, QTensor]:
    return quantize(x, clip.reshape((1,) * x.dim()), key), quantize_packing(x, clip_per_channel, key, packs)


@torch.no_grad()
def absmax(x: Tensor, axis: int) -> Tensor:
    if x.dim() < 2 or axis > 1 or not fits(x):
        return reference.absmax(x, axis)
    shape = [x.shape[dim] if dim == axis else 1 for dim in range(x.dim())]
    bits = torch.zeros(shape, dtype=torch.int32, device=x.device)
    source = laid(x)
    by = {-1: 0, 1: 1, 0: 2}[axis]
    launch(kernels.absmax, source.grid(), source.x, bits, *source.sizes, *source.strides, BY=by, **source.constants())
    return bits.view(torch.float32)


def noise_key(seed: Tensor, layer: Tensor, count: Tensor, rank: int) -> Tensor:
    key = torch.empty(2, dtype=torch.int64, device=count.device)
    launch(kernels.noise_key, (1,), seed, layer, count, key, rank, warps=1)
    return key
