# SPDX-License-Identifier: Apache-2.0
"""Quantization in the native library, with clips per tensor, sample and channel. Other clips use the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.ops.backends import reference
from byteback.ops.backends.cpu import allocator, library
from byteback.ops.backends.cpu.addresses import dense, flat, known, last, new
from byteback.ops.backends.cpu.rows import clip_layout, rows, strides
from byteback.ops.types import QTensor

_native: Any = library.native
# Bound once: after a large layer every attribute look-up in torch is a cache miss.
_threads = torch.get_num_threads
_FLOAT32, _INT64, _INT8 = torch.float32, torch.int64, torch.int8


def _like(x: Tensor, laid: Tensor, values: Tensor) -> Tensor:
    """Returns `values`, which were computed from a dense copy of x, in the memory format of x."""
    return values if laid is x else torch.empty_like(x, dtype=torch.int8).copy_(values)


def quantize(path: int, x: Tensor, clip: Tensor, key: Tensor | None) -> QTensor:
    clips = clip.numel()
    if clips != 1 and any(size != 1 for size in clip.shape[2:]):
        return reference.quantize(x, clip, key)
    laid, given = rows(x, per_sample=clip.shape[0] > 1)
    clip = clip.contiguous()
    key = key if key is None else key.contiguous()
    values, scale = allocator.empty_like(laid, _INT8), torch.empty_like(clip)
    counts, peak = new(2, _INT64), new((), _FLOAT32)
    sample_stride, channel_stride = strides(clip)
    _native.quantize(
        path,
        given,
        x=dense(laid, _FLOAT32, x.numel()),
        clip=flat(clip, _FLOAT32, clips),
        clip_count=clips,
        sample_stride=sample_stride,
        channel_stride=channel_stride,
        key=flat(key, _INT64, 2),
        values=known(values),
        scale=known(scale),
        counts=known(counts),
        peak=known(peak),
        threads=_threads(),
    )
    return QTensor(_like(x, laid, values), scale, counts, peak)


class QuantizePlan(NamedTuple):
    """How `quantize_max` runs for a shape, strides and axis. It is created once and used at every call."""

    is_dense: bool  # x has the layout that the kernels read, else it is copied first
    native: Any  # the plan of the library: layouts of x and of the results


def quantize_plan(path: int, x: Tensor, axis: int) -> QuantizePlan | tuple[()]:
    """Returns the plan for an axis of -1, 0 or 1; empty for other axes, which use the reference."""
    if axis > 1 or x.dim() > allocator.MOST_AXES:
        return ()
    laid, given = rows(x, per_sample=axis == 0)
    clip_size, clip_strides = clip_layout(x.shape, axis)
    native = _native.QuantizePlan(
        rows=given, axis=axis, size=laid.shape, strides=laid.stride(), clip_size=clip_size, clip_strides=clip_strides
    )
    return QuantizePlan(laid is x, native)


def quantize_max(
    path: int, plan: QuantizePlan | tuple[()], x: Tensor, axis: int, key: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not plan:
        return reference.quantize_max((), x, axis, key)
    laid = x if plan.is_dense else x.contiguous()
    key = key if key is None else key.contiguous()
    noise = flat(key, _INT64, 2)
    made = _native.quantize_max(path, plan.native, x=known(laid), key=noise, limit=allocator.limit, threads=_threads())
    values, scale, clip, counts = map(allocator.tensor_of, made)
    return _like(x, laid, values), scale, clip, counts


def noise_key(path: int, seed: Tensor, layer: Tensor, count: Tensor, rank: int) -> Tensor:
    key = new(2, _INT64)
    _native.noise_key(
        seed=flat(seed, _INT64, 1), layer=flat(layer, _INT64, 1), count=flat(count, _INT64, 1), rank=rank, key=known(key)
    )
    return key


def quantized_to(made: QTensor) -> Any:
    """Returns the addresses that one int8 copy is written to (csrc/bindings/structs.h)."""
    values, scale, counts, peak = made
    return _native.QuantizedTo(values=known(values), scale=known(scale), counts=known(counts), peak=known(peak))


def room(like: Tensor, scales: tuple[int, ...]) -> QTensor:
    """Returns empty tensors for an int8 copy of a dense tensor with scales of this shape."""
    return QTensor(allocator.empty_like(like, _INT8), new(scales, _FLOAT32), new(2, _INT64), new((), _FLOAT32))


def pair_room(like: Tensor) -> tuple[QTensor, QTensor]:
    """Returns empty tensors for the two int8 copies of a tensor: by one clip and by a clip per channel."""
    return room(like, (1,) * like.dim()), room(like, (1, like.shape[1], *(1,) * (like.dim() - 2)))


def quantize_pair(path: int, x: Tensor, clip: Tensor, clip_per_channel: Tensor, key: Tensor | None) -> tuple[QTensor, QTensor]:
    count, channels = x.numel(), x.shape[1]
    by_tensor, by_channel = pair_room(x)
    _native.quantize_pair(
        path,
        quantized_to(by_tensor),
        quantized_to(by_channel),
        rows=count // channels,
        channels=channels,
        x=last(x, _FLOAT32, count),
        clip=flat(clip, _FLOAT32, 1),
        clips=flat(clip_per_channel, _FLOAT32, channels),
        key=flat(key, _INT64, 2),
        threads=_threads(),
    )
    return by_tensor, by_channel
