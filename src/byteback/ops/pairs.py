# SPDX-License-Identifier: Apache-2.0
"""Two answers from one reading of a gradient: for recipes that need it per tensor and per channel at once.

A gradient is quantized twice where grad_input takes one scale for the tensor and grad_weight one for each channel. Plain
functions for tensors without gradients, outside torch.compile; each half equals the operator of the same kind bit by bit.
The gradient is a float tensor, or the fused block's dx (`GradientParts`), which is computed anew for each reading: three
numbers per channel take less time than writing it and reading it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from byteback.addresses import flat, known, last, new
from byteback.ops import native, pool, reference, statistics
from byteback.ops import normalize_checks as doors
from byteback.ops import normalize_reference as plain
from byteback.ops.normalize_native import backward_numbers
from byteback.ops.normalize_reference import GradientParts

Quantized = tuple[Tensor, Tensor, Tensor, Tensor]
"""values, scale, counts, peak"""

_library: Any = native.library
_float32, _int64 = torch.float32, torch.int64


def tail_count_pair(x: Tensor, each: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """ops.tail_count with a threshold for each channel, (C,), and with one for all: two int64 tensors (1, C, 1, ...).

    >>> x = torch.tensor([[1.0, -3.0], [2.0, 0.5]])
    >>> [count.tolist() for count in tail_count_pair(x, torch.tensor([0.5, 4.0]), torch.tensor(0.75))]
    [[[2, 0]], [[2, 1]]]
    """
    op = "tail_count_pair"
    x = doors.check_tensor(op, "x", x)
    channels = x.shape[1]
    each, threshold = doors.check_vector(op, "each", each, channels), doors.check_one(op, "threshold", threshold)
    shape = (1, channels, *(1,) * (x.dim() - 2))
    path = doors.path_for(op, x, each, threshold)
    if path is None:
        with torch.no_grad():
            one = threshold.reshape((1,) * x.dim())
            return statistics.tail_count(x, plain.column(each, x)), statistics.tail_count(x, one)
    over_each, over_all = new(shape, _int64), new(shape, _int64)
    _library.tail_count_pair(
        path,
        x.numel() // channels,
        channels,
        last(x, _float32, x.numel()),
        flat(each, _float32, channels),
        flat(threshold, _float32, 1),
        known(over_each),
        known(over_all),
        torch.get_num_threads(),
    )
    return over_each, over_all


def normalize_grad_tails(parts: GradientParts, each: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """max|dx| of each channel and tail_count_pair(dx, each, threshold), with the dx of normalize_grad, which is not written.

    >>> g, one, nothing = torch.tensor([[1.0, -3.0], [2.0, 0.5]]), torch.ones(2), torch.zeros(2)
    >>> parts = GradientParts(g, g, None, None, None, "none", one, nothing, nothing)
    >>> [t.tolist() for t in normalize_grad_tails(parts, torch.tensor([0.5, 4.0]), torch.tensor(0.75))]
    [[[2.0, 3.0]], [[2, 0]], [[2, 1]]]
    """
    op = "normalize_grad_tails"
    parts = doors.check_parts(op, parts)
    g = parts.g
    channels = g.shape[1]
    each, threshold = doors.check_vector(op, "each", each, channels), doors.check_one(op, "threshold", threshold)
    path = doors.path_of_parts(op, parts, each, threshold)
    if path is None:
        with torch.no_grad():
            dx = plain.normalize_grad(parts)
            return statistics.absmax(dx, 1), *tail_count_pair(dx, each, threshold)
    shape = (1, channels, *(1,) * (g.dim() - 2))
    peak, over_each, over_all = new(shape, _float32), new(shape, _int64), new(shape, _int64)
    _library.normalize_grad_tails(
        path,
        backward_numbers(*parts),
        flat(each, _float32, channels),
        flat(threshold, _float32, 1),
        known(peak),
        known(over_each),
        known(over_all),
        torch.get_num_threads(),
    )
    return peak, over_each, over_all


def _check_clips(op: str, x: Tensor, clip: Tensor, each: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    clip, key = doors.check_one(op, "clip", clip), doors.check_key(op, key)
    shape = (1, x.shape[1], *(1,) * (x.dim() - 2))
    if each.shape != shape or each.dtype is not torch.float32:
        raise ValueError(
            f"{op}: clip_per_channel has shape {tuple(each.shape)} and dtype {each.dtype}, but for a tensor of shape "
            f"{tuple(x.shape)} it is float32 {shape}. Reshape it."
        )
    return clip, each.contiguous(), key


def quantize_pair(x: Tensor, clip: Tensor, clip_per_channel: Tensor, key: Tensor | None) -> tuple[Quantized, Quantized]:
    """ops.quantize(x, clip, key) and ops.quantize(x, clip_per_channel, key): the same noise, one reading of x.

    >>> x = torch.tensor([[1.0, -3.0]])
    >>> both = quantize_pair(x, torch.tensor(3.0), torch.tensor([[1.0, 6.0]]), None)
    >>> [values.tolist() for values, *_ in both]
    [[[42, -127]], [[127, -64]]]
    """
    op = "quantize_pair"
    x = doors.check_tensor(op, "x", x)
    clip, each, key = _check_clips(op, x, clip, clip_per_channel, key)
    path = doors.path_for(op, x, clip, each, key)
    if path is None:
        return _pair(x, clip, each, key)
    count, channels = x.numel(), x.shape[1]
    numbers = count // channels, channels, last(x, _float32, count)
    return _native_pair(x, clip, each, key, lambda *rest: _library.quantize_pair(path, *numbers, *rest))


def normalize_grad_quantize_pair(
    parts: GradientParts, clip: Tensor, clip_per_channel: Tensor, key: Tensor | None
) -> tuple[Quantized, Quantized]:
    """quantize_pair(dx, ...) with the dx of normalize_grad, which is not written.

    >>> g, one, nothing = torch.tensor([[1.0, -3.0]]), torch.ones(2), torch.zeros(2)
    >>> parts = GradientParts(g, g, None, None, None, "none", one, nothing, nothing)
    >>> both = normalize_grad_quantize_pair(parts, torch.tensor(3.0), torch.tensor([[1.0, 6.0]]), None)
    >>> [values.tolist() for values, *_ in both]
    [[[42, -127]], [[127, -64]]]
    """
    op = "normalize_grad_quantize_pair"
    parts = doors.check_parts(op, parts)
    clip, each, key = _check_clips(op, parts.g, clip, clip_per_channel, key)
    path = doors.path_of_parts(op, parts, clip, each, key)
    if path is None:
        with torch.no_grad():
            return _pair(plain.normalize_grad(parts), clip, each, key)
    numbers = backward_numbers(*parts)
    return _native_pair(parts.g, clip, each, key, lambda *rest: _library.normalize_grad_quantize_pair(path, numbers, *rest))


def normalize_grad_quantize_by_ratio(parts: GradientParts, ratio: float, key: Tensor | None) -> tuple[Tensor, Quantized]:
    """clip = ratio · max|dx| of each channel, and ops.quantize(dx, clip, key) of normalize_grad's dx, which is not written.

    >>> g, one, nothing = torch.tensor([[1.0, -4.0], [0.5, 2.0]]), torch.ones(2), torch.zeros(2)
    >>> parts = GradientParts(g, g, None, None, None, "none", one, nothing, nothing)
    >>> clip, (values, *_) = normalize_grad_quantize_by_ratio(parts, 0.5, None)
    >>> clip.tolist(), values.tolist()
    ([[0.5, 2.0]], [[127, -127], [127, 127]])
    """
    op = "normalize_grad_quantize_by_ratio"
    parts, key = doors.check_parts(op, parts), doors.check_key(op, key)
    path = doors.path_of_parts(op, parts, key)
    g = parts.g
    channels = g.shape[1]
    shape = (1, channels, *(1,) * (g.dim() - 2))
    if path is None:
        with torch.no_grad():
            dx = plain.normalize_grad(parts)
            clip = statistics.absmax(dx, 1) * ratio
            return clip, reference.quantize(dx, clip, key)
    clip, scale, peak = new(shape, _float32), new(shape, _float32), new((), _float32)
    values, counts = pool.empty_like(g, torch.int8), new((2,), torch.int64)
    _library.normalize_grad_quantize_by_ratio(
        path,
        backward_numbers(*parts),
        ratio,
        flat(key, torch.int64, 2),
        *map(known, (clip, values, scale, counts, peak)),
        torch.get_num_threads(),
    )
    return clip, (values, scale, counts, peak)


def _pair(x: Tensor, clip: Tensor, each: Tensor, key: Tensor | None) -> tuple[Quantized, Quantized]:
    with torch.no_grad():
        return reference.quantize(x, clip.reshape((1,) * x.dim()), key), reference.quantize(x, each, key)


def _native_pair(
    like: Tensor, clip: Tensor, each: Tensor, key: Tensor | None, run: Callable[..., None]
) -> tuple[Quantized, Quantized]:
    values = pool.empty_like(like, torch.int8), pool.empty_like(like, torch.int8)
    scale = new((1,) * like.dim(), _float32), new(each.shape, _float32)
    counts, peak = (new(2, _int64), new(2, _int64)), (new((), _float32), new((), _float32))
    run(
        flat(clip, _float32, 1),
        flat(each, _float32, like.shape[1]),
        flat(key, _int64, 2),
        *([known(first), known(second)] for first, second in (values, scale, counts, peak)),
        torch.get_num_threads(),
    )
    return (values[0], scale[0], counts[0], peak[0]), (values[1], scale[1], counts[1], peak[1])
