# SPDX-License-Identifier: Apache-2.0
"""Float statistics on the native library, with the bits of reference/statistics.py."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from byteback.ops.backends import reference
from byteback.ops.backends.cpu import library
from byteback.ops.backends.cpu.addresses import CPU, dense, flat, known, last, new
from byteback.ops.backends.cpu.rows import clip_layout, rows, strides

_native: Any = library.native
# Bound once: after a large layer every look-up in PyTorch's module is a miss of the cache.
_threads = torch.get_num_threads
_FLOAT32, _FLOAT64, _INT64, _INT8 = torch.float32, torch.float64, torch.int64, torch.int8


def absmax(path: int, x: Tensor, axis: int) -> Tensor:
    if x.dim() < 2 or axis > 1:
        return reference.absmax(x, axis)
    laid, numbers = rows(x, per_sample=axis == 0)
    # With strides given, PyTorch makes a tensor in half the time.
    result = torch.empty_strided(*clip_layout(x.shape, axis), dtype=_FLOAT32, device=CPU)
    _native.absmax(path, numbers, dense(laid, _FLOAT32, x.numel()), known(result), axis, _threads())
    return result


def _column(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for one number per channel, (1, C, 1, ...)."""
    return new((1, x.shape[1], *(1,) * (x.dim() - 2)), dtype)


def moments(path: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    laid, numbers = rows(x)
    peak, total, squares = _column(x, _FLOAT32), _column(x, _FLOAT64), _column(x, _FLOAT64)
    made = known(peak), known(total), known(squares)
    _native.moments(path, numbers, dense(laid, _FLOAT32, x.numel()), *made, _threads())
    return peak, total, squares


def channel_stats(path: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, channels = x.numel(), x.shape[1]
    total, squares = new(channels, _FLOAT64), new(channels, _FLOAT64)
    low, high = new(channels, _FLOAT32), new(channels, _FLOAT32)
    made = known(total), known(squares), known(low), known(high)
    _native.channel_stats(path, count // channels, channels, last(x, _FLOAT32, count), *made, _threads())
    return total, squares, low, high


def tail_count(path: int, x: Tensor, threshold: Tensor) -> Tensor:
    laid, numbers = rows(x)
    threshold, single = threshold.contiguous(), threshold.numel() == 1
    counts = _column(x, _INT64)
    _native.tail_count(
        path,
        numbers,
        dense(laid, _FLOAT32, x.numel()),
        flat(threshold, _FLOAT32, 1 if single else x.shape[1]),
        0 if single else 1,
        known(counts),
        _threads(),
    )
    return counts


def tail_count_pair(path: int, x: Tensor, per_channel: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    count, channels = x.numel(), x.shape[1]
    over_each, over_all = _column(x, _INT64), _column(x, _INT64)
    _native.tail_count_pair(
        path,
        count // channels,
        channels,
        last(x, _FLOAT32, count),
        flat(per_channel, _FLOAT32, channels),
        flat(threshold, _FLOAT32, 1),
        known(over_each),
        known(over_all),
        _threads(),
    )
    return over_each, over_all


def dot_terms(path: int, x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    if any(size != 1 for size in scale.shape[2:]):  # scales per tensor, sample and channel only
        return reference.dot_terms(x, values, scale)
    laid, numbers = rows(x, per_sample=scale.shape[0] > 1)
    q = values if values.stride() == laid.stride() else torch.empty_like(laid, dtype=_INT8).copy_(values)
    scale = scale.contiguous()
    terms = new(3, _FLOAT64)
    _native.dot_terms(
        path,
        numbers,
        dense(laid, _FLOAT32, x.numel()),
        dense(q, _INT8, x.numel()),
        flat(scale, _FLOAT32, math.prod(scale.shape[:2])),
        *strides(scale),
        known(terms),
        _threads(),
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
    laid, numbers = rows(x)
    clips, count, per_channel = clips.contiguous(), clips.shape[0], clips.dim() == 2
    given = dense(laid, _FLOAT32, x.numel()), flat(clips, _FLOAT32, count * (x.shape[1] if per_channel else 1))
    _native.cosine_terms(path, numbers, *given, count, per_channel, stochastic, known(terms), _threads())
    return terms


def cosine_slope_terms(path: int, x: Tensor, clip: Tensor) -> Tensor:
    laid, numbers = rows(x)
    terms = new(5, _FLOAT64)
    _native.cosine_slope_terms(path, numbers, dense(laid, _FLOAT32, x.numel()), clip.item(), known(terms), _threads())
    return terms
