# SPDX-License-Identifier: Apache-2.0
"""Magnitude-aware clips in the native library (csrc/bindings/bindings_pairs.cpp)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback.ops.backends.cpu import allocator, library
from byteback.ops.backends.cpu.addresses import flat, known, last, new
from byteback.ops.backends.cpu.block_grad import backward_of
from byteback.ops.programs import Averaged
from byteback.ops.types import Before, Clips, GradientParts, Paired, QTensor

_native: Any = library.native
_threads = torch.get_num_threads
_FLOAT32, _FLOAT64, _INT64, _INT8 = torch.float32, torch.float64, torch.int64, torch.int8


def _rule(rule: Averaged, before_one: Before, before_each: Before, channels: int) -> Any:
    """Returns the MagnitudeClips (csrc/bindings/magnitude_clips.h)."""
    threshold, keep, add = rule
    last_one, last_each = flat(before_one, _FLOAT32, 1), flat(before_each, _FLOAT32, channels)
    return _native.MagnitudeClips(threshold=threshold, keep=keep, add=add, before_one=last_one, before_each=last_each)


def _sizes(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the size of one clip, and that of a clip per channel."""
    return (1,) * x.dim(), (1, x.shape[1], *(1,) * (x.dim() - 2))


def magnitude_clips(
    path: int, rule: Averaged, x: Tensor, peak: Tensor, total: Tensor, squares: Tensor, before_one: Before, before_each: Before
) -> Clips:
    channels, (single, per_channel) = x.shape[1], _sizes(x)
    one, each = new(single, _FLOAT32), new(per_channel, _FLOAT32)
    shares = _native.magnitude_clips(
        path,
        _rule(rule, before_one, before_each, channels),
        rows=x.numel() // channels,
        channels=channels,
        x=last(x, _FLOAT32, x.numel()),
        peak=flat(peak, _FLOAT32, channels),
        total=flat(total, _FLOAT64, channels),
        squares=flat(squares, _FLOAT64, channels),
        clip=known(one),
        clips=known(each),
        threads=_threads(),
    )
    return Clips(one, each, *shares)


def gradient_pair(
    path: int,
    rule: Averaged,
    parts: GradientParts,
    sums: tuple[Tensor, Tensor],
    before_one: Before,
    before_each: Before,
    key: Tensor | None,
    want_one: bool,
) -> Paired:
    g, (total, squares) = parts.g, sums
    channels, (single, per_channel) = g.shape[1], _sizes(g)
    clip, clip_each = new(single, _FLOAT32), new(per_channel, _FLOAT32)
    values_each, scale_each = allocator.empty_like(g, _INT8), new(per_channel, _FLOAT32)
    values, scale = (allocator.empty_like(g, _INT8), new(single, _FLOAT32)) if want_one else (None, None)
    gaussian, gaussian_each, saturated, saturated_each, nonfinite = _native.gradient_pair(
        path,
        backward_of(*parts),
        _rule(rule, before_one, before_each, channels),
        total=flat(total, _FLOAT64, channels),
        squares=flat(squares, _FLOAT64, channels),
        key=flat(key, _INT64, 2),
        clip=known(clip),
        clips=known(clip_each),
        values=known(values),
        scale=known(scale),
        values_each=known(values_each),
        scale_each=known(scale_each),
        threads=_threads(),
    )
    clips = Clips(clip, clip_each, gaussian, gaussian_each)
    one = None if values is None or scale is None else QTensor(values, scale)
    return Paired(clips, one, QTensor(values_each, scale_each), (saturated, saturated_each), nonfinite)
