# SPDX-License-Identifier: Apache-2.0
"""Float statistics in the native library, with the same bits as reference/statistics.py."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from byteback.ops.backends import reference
from byteback.ops.backends.cpu import library
from byteback.ops.backends.cpu.addresses import CPU, KINDS, dense, flat, known, last, new
from byteback.ops.backends.cpu.rows import clip_layout, rows, strides

_native: Any = library.native
# Bound once: after a large layer every attribute look-up in torch is a cache miss.
_threads = torch.get_num_threads
_FLOAT32, _FLOAT64, _INT64, _INT8 = torch.float32, torch.float64, torch.int64, torch.int8


def absmax(path: int, x: Tensor, axis: int) -> Tensor:
    if x.dim() < 2 or axis > 1:
        return reference.absmax(x, axis)
    laid, given = rows(x, per_sample=axis == 0)
    # PyTorch creates a tensor in half the time if strides are given.
    result = torch.empty_strided(*clip_layout(x.shape, axis), dtype=_FLOAT32, device=CPU)
    address = dense(laid, _FLOAT32, x.numel())
    _native.absmax(path, given, axis=axis, x=address, result=known(result), threads=_threads())
    return result


def _column(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an empty tensor with one number per channel, (1, C, 1, ...)."""
    return new((1, x.shape[1], *(1,) * (x.dim() - 2)), dtype)


def moments(path: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    laid, given = rows(x)
    peak, total, squares = _column(x, _FLOAT32), _column(x, _FLOAT64), _column(x, _FLOAT64)
    _native.moments(
        path,
        given,
        x=dense(laid, _FLOAT32, x.numel()),
        peak=known(peak),
        total=known(total),
        squares=known(squares),
        threads=_threads(),
    )
    return peak, total, squares


def channel_stats(path: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, channels = x.numel(), x.shape[1]
    total, squares = new(channels, _FLOAT64), new(channels, _FLOAT64)
    low, high = new(channels, _FLOAT32), new(channels, _FLOAT32)
    _native.channel_stats(
        path,
        rows=count // channels,
        channels=channels,
        x=last(x, x.dtype, count),
        kind=KINDS[x.dtype],
        total=known(total),
        squares=known(squares),
        low=known(low),
        high=known(high),
        threads=_threads(),
    )
    return total, squares, low, high


def tail_count(path: int, x: Tensor, threshold: Tensor) -> Tensor:
    laid, given = rows(x)
    threshold, single = threshold.contiguous(), threshold.numel() == 1
    counts = _column(x, _INT64)
    _native.tail_count(
        path,
        given,
        x=dense(laid, _FLOAT32, x.numel()),
        threshold=flat(threshold, _FLOAT32, 1 if single else x.shape[1]),
        channel_stride=0 if single else 1,
        counts=known(counts),
        threads=_threads(),
    )
    return counts


def tail_count_pair(path: int, x: Tensor, per_channel: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    count, channels = x.numel(), x.shape[1]
    over_each, over_all = _column(x, _INT64), _column(x, _INT64)
    _native.tail_count_pair(
        path,
        rows=count // channels,
        channels=channels,
        x=last(x, _FLOAT32, count),
        each=flat(per_channel, _FLOAT32, channels),
        all=flat(threshold, _FLOAT32, 1),
        over_each=known(over_each),
        over_all=known(over_all),
        threads=_threads(),
    )
    return over_each, over_all


def dot_terms(path: int, x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    if any(size != 1 for size in scale.shape[2:]):  # scales per tensor, sample and channel only
        return reference.dot_terms(x, values, scale)
    laid, given = rows(x, per_sample=scale.shape[0] > 1)
    q = values if values.stride() == laid.stride() else torch.empty_like(laid, dtype=_INT8).copy_(values)
    scale = scale.contiguous()
    terms, (sample_stride, channel_stride) = new(3, _FLOAT64), strides(scale)
    _native.dot_terms(
        path,
        given,
        x=dense(laid, _FLOAT32, x.numel()),
        values=dense(q, _INT8, x.numel()),
        scale=flat(scale, _FLOAT32, math.prod(scale.shape[:2])),
        sample_stride=sample_stride,
        channel_stride=channel_stride,
        terms=known(terms),
        threads=_threads(),
    )
    return terms


def cosine_terms(path: int, x: Tensor, clips: Tensor, stochastic: bool) -> Tensor:
    if not clips.numel():
        return reference.cosine_terms(x, clips, stochastic)
    return _cosine_terms(path, x, clips, stochastic, new((clips.shape[0], 3), _FLOAT64))


def channel_cosine_terms(path: int, x: Tensor, clips: Tensor, stochastic: bool) -> Tensor:
    if not clips.numel():
        return reference.channel_cosine_terms(x, clips, stochastic)
    return _cosine_terms(path, x, clips, stochastic, new((clips.shape[0], 3, x.shape[1]), _FLOAT64))


def _cosine_terms(path: int, x: Tensor, clips: Tensor, stochastic: bool, terms: Tensor) -> Tensor:
    laid, given = rows(x)
    clips, count, per_channel = clips.contiguous(), clips.shape[0], clips.dim() == 2
    _native.cosine_terms(
        path,
        given,
        x=dense(laid, _FLOAT32, x.numel()),
        clips=flat(clips, _FLOAT32, count * (x.shape[1] if per_channel else 1)),
        count=count,
        per_channel=per_channel,
        stochastic=stochastic,
        terms=known(terms),
        threads=_threads(),
    )
    return terms


def cosine_slope_terms(path: int, x: Tensor, clip: Tensor) -> Tensor:
    laid, given = rows(x)
    terms, address = new(5, _FLOAT64), dense(laid, _FLOAT32, x.numel())
    _native.cosine_slope_terms(path, given, x=address, clip=clip.item(), terms=known(terms), threads=_threads())
    return terms
