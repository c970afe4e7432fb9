# SPDX-License-Identifier: Apache-2.0
"""Statistics on a GPU, with the bits of reference/statistics.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback.ops.backends import reference
from byteback.ops.backends.reference.statistics import sum_last
from byteback.ops.backends.triton.kernels import sums
from byteback.ops.backends.triton.launch import blocks, fits, launch, power_of_two
from byteback.ops.backends.triton.plan import rows_of
from byteback.ops.backends.triton.tiles import height
from byteback.ops.contract.limits import STATISTICS_BLOCK

_LEAVES = 64  # rows that one launch of `fold` adds


def tile(x: Tensor) -> dict[str, int]:
    """Returns how many blocks of 64 rows and how many channels a program adds."""
    c = x.shape[1]
    width = power_of_two(c, 8, 64)
    return {"BB": height(blocks(x.numel() // c, STATISTICS_BLOCK), width, x.device, 8), "BC": width}


def sums_grid(x: Tensor, *more: int) -> tuple[int, ...]:
    size, c = tile(x), x.shape[1]
    rows = x.numel() // c
    return blocks(blocks(rows, STATISTICS_BLOCK), size["BB"]), blocks(c, size["BC"]), *more


def new_part(x: Tensor, count: int, rows: int, c: int) -> tuple[Tensor, int]:
    """Returns the partial sums (count, blocks, C) and the distance from one sum to the next."""
    part = torch.empty((count, blocks(rows, STATISTICS_BLOCK), c), dtype=torch.float64, device=x.device)
    return part, part.stride(0)


def fold(part: Tensor, when: Tensor | None = None) -> Tensor:
    """Returns the halving-tree sum along the second axis of part (sums, rows, C): (sums, C)."""
    count, rows, c = part.shape
    width = 1 << (rows - 1).bit_length()
    while width > 1:
        leaves = min(width, _LEAVES)
        width //= leaves
        out = torch.empty((count, width, c), dtype=torch.float64, device=part.device)
        channels = power_of_two(c, 4, 16)
        strides = part.stride()
        arguments = (part, out, part if when is None else when, part.shape[1], width, c, *strides)
        grid = width, blocks(c, channels), count
        launch(sums.fold, grid, *arguments, IF=when is not None, LEAVES=leaves, BC=channels)
        part = out
    return part[:, 0]


def fold_channels(each: Tensor, when: Tensor | None = None) -> Tensor:
    """Returns the halving-tree sum along the last axis of (sums, C): (sums,)."""
    return fold(each.unsqueeze(2), when)[:, 0]


def _stats(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns Σx and Σx² as (2, C), and the minima and maxima of the blocks."""
    rows = rows_of(x)
    c = x.shape[1]
    count = x.numel() // c
    part, apart = new_part(x, 2, count, c)
    low, high = (torch.empty(part.shape[1:], dtype=torch.float32, device=x.device) for _ in range(2))
    launch(sums.stats, sums_grid(x), rows, part, low, high, count, c, apart, **tile(x))
    return fold(part), low.amin(0), high.amax(0)


@torch.no_grad()
def channel_stats(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not fits(x):
        return reference.channel_stats(x)
    (total, squares), low, high = _stats(x)
    return total, squares, low + 0.0, high + 0.0  # adding +0 converts -0 to +0


@torch.no_grad()
def moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not fits(x):
        return reference.moments(x)
    (total, squares), low, high = _stats(x)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    return torch.maximum(low.abs(), high.abs()).reshape(shape), total.reshape(shape), squares.reshape(shape)


@torch.no_grad()
def tail_count(x: Tensor, threshold: Tensor) -> Tensor:
    if not fits(x) or threshold.numel() not in (1, x.shape[1]):
        return reference.tail_count(x, threshold)
    flat = threshold.reshape(-1).contiguous()
    return _tails(x, flat, flat[:1])[0]


@torch.no_grad()
def tail_count_pair(x: Tensor, per_channel: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    if not fits(x):
        return reference.tail_count_pair(x, per_channel, threshold)
    return _tails(x, per_channel.reshape(-1).contiguous(), threshold.reshape(-1).contiguous())


def _tails(x: Tensor, each: Tensor, one: Tensor) -> tuple[Tensor, Tensor]:
    c = x.shape[1]
    rows = x.numel() // c
    counts = torch.zeros((2, 1, c, *(1,) * (x.dim() - 2)), dtype=torch.int64, device=x.device)
    width = power_of_two(c, 4, 64)
    tall = height(rows, width, x.device)
    grid = blocks(rows, tall), blocks(c, width)
    arguments = (rows_of(x), each, one, counts[0], counts[1], rows, c, int(each.numel() > 1))
    launch(sums.tails, grid, *arguments, BR=tall, BC=width)
    return counts[0], counts[1]


@torch.no_grad()
def dot_terms(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    if not fits(x) or scale.numel() != scale.shape[1]:
        return reference.dot_terms(x, values, scale)
    return dots(x, values, scale, None)


def dots(x: Tensor, values: Tensor, scale: Tensor, when: Tensor | None) -> Tensor:
    """Returns dot_terms for one scale, or one per channel. If the number `when` is 0, the result is not written."""
    c = x.shape[1]
    rows = x.numel() // c
    part, apart = new_part(x, 3, rows, c)
    arguments = (rows_of(x), rows_of(values), part, part if when is None else when, rows, c, apart)
    launch(sums.dots, sums_grid(x), *arguments, IF=when is not None, **tile(x))
    each, wide = fold(part, when), scale.double().reshape(-1)
    scaled = torch.stack([each[0] * wide, each[1] * (wide * wide), each[2]])
    return fold_channels(scaled, when)


@torch.no_grad()
def channel_cosine_terms(x: Tensor, clips: Tensor, stochastic: bool) -> Tensor:
    if not fits(x) or clips.shape[0] == 0:
        return reference.channel_cosine_terms(x, clips, stochastic)
    return cosines(x, clips, stochastic, None)


def cosines(x: Tensor, clips: Tensor, stochastic: bool, when: Tensor | None) -> Tensor:
    """Returns channel_cosine_terms. If the number `when` is 0, the result is not written."""
    c, tried = x.shape[1], clips.shape[0]
    rows = x.numel() // c
    part, apart = new_part(x, 3 * tried, rows, c)
    steps = (clips.stride(0), clips.stride(1) if clips.shape[1] > 1 else 0)
    arguments = (rows_of(x), clips, part, part if when is None else when, rows, c, apart, *steps)
    grid = sums_grid(x, tried)
    launch(sums.cosines, grid, *arguments, STOCHASTIC=stochastic, IF=when is not None, **tile(x))
    return fold(part, when).reshape(tried, 3, c)


@torch.no_grad()
def cosine_terms(x: Tensor, clips: Tensor, stochastic: bool) -> Tensor:
    each: Any = channel_cosine_terms(x, clips.reshape(-1, 1), stochastic)
    return sum_last(each)


cosine_slope_terms = reference.cosine_slope_terms
