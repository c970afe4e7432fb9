# SPDX-License-Identifier: Apache-2.0
"""Two answers from one reading of a gradient: for recipes that need it per tensor and per channel at once.

A gradient is quantized twice where grad_input takes one scale for the tensor and grad_weight one for each channel. Plain
functions for tensors without gradients, outside torch.compile; each half equals the operator of the same kind bit by bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from byteback.ops import native, pool, reference, statistics
from byteback.ops import normalize_checks as doors
from byteback.ops import normalize_reference as plain

Quantized = tuple[Tensor, Tensor, Tensor, Tensor]
"""values, scale, counts, peak"""

_library: Any = native.library


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
    path = doors.path_for(x, each, threshold)
    if path is None:
        with torch.no_grad():
            one = threshold.reshape((1,) * x.dim())
            return statistics.tail_count(x, plain.column(each, x)), statistics.tail_count(x, one)
    over_each, over_all = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)
    _library.tail_count_pair(
        path,
        x.numel() // channels,
        channels,
        x.data_ptr(),
        each.data_ptr(),
        threshold.data_ptr(),
        over_each.data_ptr(),
        over_all.data_ptr(),
        torch.get_num_threads(),
    )
    return over_each, over_all


def quantize_pair(x: Tensor, clip: Tensor, clip_per_channel: Tensor, key: Tensor | None) -> tuple[Quantized, Quantized]:
    """ops.quantize(x, clip, key) and ops.quantize(x, clip_per_channel, key): the same noise, one reading of x.

    >>> x = torch.tensor([[1.0, -3.0]])
    >>> both = quantize_pair(x, torch.tensor(3.0), torch.tensor([[1.0, 6.0]]), None)
    >>> [values.tolist() for values, *_ in both]
    [[[42, -127]], [[127, -64]]]
    """
    op = "quantize_pair"
    x = doors.check_tensor(op, "x", x)
    channels = x.shape[1]
    clip, key = doors.check_one(op, "clip", clip), doors.check_key(op, key)
    shape = (1, channels, *(1,) * (x.dim() - 2))
    if clip_per_channel.shape != shape or clip_per_channel.dtype is not torch.float32:
        raise ValueError(
            f"{op}: clip_per_channel has shape {tuple(clip_per_channel.shape)} and dtype {clip_per_channel.dtype}, but for "
            f"x of shape {tuple(x.shape)} it is float32 {shape}. Reshape it."
        )
    path = doors.path_for(x, clip, clip_per_channel, key)
    if path is None:
        with torch.no_grad():
            one = clip.reshape((1,) * x.dim())
            return reference.quantize(x, one, key), reference.quantize(x, clip_per_channel, key)
    clip_per_channel = clip_per_channel.contiguous()
    values = pool.empty_like(x, torch.int8), pool.empty_like(x, torch.int8)
    scale = torch.empty((1,) * x.dim(), dtype=torch.float32), torch.empty(shape, dtype=torch.float32)
    counts = torch.empty(2, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
    peak = torch.empty((), dtype=torch.float32), torch.empty((), dtype=torch.float32)
    _library.quantize_pair(
        path,
        x.numel() // channels,
        channels,
        x.data_ptr(),
        clip.data_ptr(),
        clip_per_channel.data_ptr(),
        0 if key is None else key.data_ptr(),
        *([tensor.data_ptr() for tensor in tensors] for tensors in (values, scale, counts, peak)),
        torch.get_num_threads(),
    )
    return (values[0], scale[0], counts[0], peak[0]), (values[1], scale[1], counts[1], peak[1])
