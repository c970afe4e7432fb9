# SPDX-License-Identifier: Apache-2.0
"""From tensors to the native library: layouts, addresses, results. Same functions as reference.py and statistics.py.

The library reads activations as N, D, H, W, C and weights as K, T, R, S, C, dense. A channels_last tensor is that already;
others are copied. 1-D and 2-D convolutions are 3-D ones with sizes of 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from byteback.ops import layout, native
from byteback.ops.scale_rule import combine_scales


def _library() -> Any:
    return native.library


def _channels_last(x: Tensor) -> Tensor:
    """x (N, C, ...) as a dense (N, ..., C) tensor."""
    return x.movedim(1, -1).contiguous()


def _three(values: Any, fill: int) -> list[int]:
    """Per-axis numbers of a 1-D, 2-D or 3-D convolution, filled up in front to three."""
    return [fill] * (3 - len(values)) + list(values)


def _shape(
    x_size: list[int],
    w_size: list[int],
    out_size: list[int],
    geometry: tuple[list[int], list[int], list[int], int],
) -> list[int]:
    """The numbers of csrc/types.h's ConvShape in order."""
    stride, padding, dilation, groups = geometry
    return [
        x_size[0],
        x_size[1],
        w_size[0],
        groups,
        *_three(x_size[2:], 1),
        *_three(w_size[2:], 1),
        *_three(out_size[2:], 1),
        *_three(stride, 1),
        *_three(padding, 0),
        *_three(dilation, 1),
    ]


def _run(product: str, shape: list[int], a: Tensor, b: Tensor, factor: Tensor, result: Tensor) -> Tensor:
    """Runs a product into a dense channels-last buffer and returns it in the memory format of `result`."""
    rows, columns = factor.shape[0], factor.shape[1]
    factor = factor.contiguous()
    direct = result.movedim(1, -1)
    buffer = direct if direct.is_contiguous() else torch.empty(direct.shape, dtype=torch.float32)
    native.last_kernel = getattr(_library(), product)(
        native.number(),
        shape,
        a.data_ptr(),
        b.data_ptr(),
        factor.data_ptr(),
        columns if rows > 1 else 0,
        1 if columns > 1 else 0,
        buffer.data_ptr(),
        torch.get_num_threads(),
    )
    return result if buffer is direct else result.copy_(buffer.movedim(-1, 1))


def conv_int8(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, out_size: list[int], *geometry: Any) -> Tensor:
    shape = _shape(list(x.shape), list(w.shape), out_size, geometry)
    factor = combine_scales("output", x_scale, w_scale, geometry[3], w.shape[0])
    return _run("conv_output", shape, _channels_last(x), _channels_last(w), factor, layout.empty_like_product(out_size, x, w))


def conv_int8_grad_input(
    g: Tensor, g_scale: Tensor, w: Tensor, w_scale: Tensor, input_size: list[int], *geometry: Any
) -> Tensor:
    shape = _shape(input_size, list(w.shape), list(g.shape), geometry)
    factor = combine_scales("grad_input", g_scale, w_scale, geometry[3], w.shape[0])
    result = layout.empty_like_product(input_size, g, w)
    return _run("conv_grad_input", shape, _channels_last(g), _channels_last(w), factor, result)


def conv_int8_grad_weight(
    g: Tensor, g_scale: Tensor, x: Tensor, x_scale: Tensor, weight_size: list[int], *geometry: Any
) -> Tensor:
    shape = _shape(list(x.shape), weight_size, list(g.shape), geometry)
    factor = combine_scales("grad_weight", g_scale, x_scale, geometry[3], g.shape[1])
    result = layout.empty_like_product(weight_size, g, x)
    return _run("conv_grad_weight", shape, _channels_last(g), _channels_last(x), factor, result)


def matmul_int8(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """A 1x1 convolution: each row of a is an image of one pixel, each column of b an output channel."""
    rows, depth = a.shape
    columns = b.shape[1]
    ones = ([1], [0], [1], 1)
    shape = _shape([rows, depth, 1], [columns, depth, 1], [rows, columns, 1], ones)
    result = torch.empty(rows, columns, dtype=torch.float32)
    _run("conv_output", shape, a.contiguous(), b.t().contiguous(), a_scale * b_scale, result)
    return result


# ---- quantize and its statistics -------------------------------------------------------------------------------------


def _rows(x: Tensor, per_sample: bool = False) -> tuple[Tensor, list[int]]:
    """x, copied if it must be, and its layout as csrc/elementwise.h's Rows: outer, inner, channels and their strides."""
    n, c = x.shape[:2]
    pixels = math.prod(x.shape[2:])
    if x.movedim(1, -1).is_contiguous():
        return x, ([n, pixels, c, pixels * c, c, 1] if per_sample else [1, n * pixels, c, 0, c, 1])
    return x.contiguous(), [n, pixels, c, pixels * c, 1, pixels]


def _strides(per_scale: Tensor) -> tuple[int, int]:
    """(per sample, per channel) strides of a dense clip or scale (N or 1, C or 1, 1, ...)."""
    return (per_scale.shape[1] if per_scale.shape[0] > 1 else 0), (1 if per_scale.shape[1] > 1 else 0)


def quantize(x: Tensor, clip: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dense, rows = _rows(x, per_sample=clip.shape[0] > 1)
    clip = clip.contiguous()
    values, scale = torch.empty_like(dense, dtype=torch.int8), torch.empty_like(clip)
    counts, peak = torch.empty(2, dtype=torch.int64), torch.empty((), dtype=torch.float32)
    _library().quantize(
        native.number(),
        rows,
        dense.data_ptr(),
        clip.data_ptr(),
        *_strides(clip),
        clip.numel(),
        0 if key is None else key.contiguous().data_ptr(),
        values.data_ptr(),
        scale.data_ptr(),
        counts.data_ptr(),
        peak.data_ptr(),
        torch.get_num_threads(),
    )
    if dense is not x:
        values = torch.empty_like(x, dtype=torch.int8).copy_(values)
    return values, scale, counts, peak


def absmax(x: Tensor, axis: int) -> Tensor:
    dense, rows = _rows(x, per_sample=axis == 0)
    per_channel = axis == 1
    shape = [x.shape[dim] if dim == axis else 1 for dim in range(x.dim())]
    result = torch.empty(x.shape[0] if axis == 0 else x.shape[1], dtype=torch.float32)
    _library().absmax(native.number(), rows, dense.data_ptr(), result.data_ptr(), axis == 0, torch.get_num_threads())
    return result.reshape(shape) if per_channel or axis == 0 else result.amax().reshape(shape)


def moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dense, rows = _rows(x)
    shape = [1, x.shape[1], *(1,) * (x.dim() - 2)]
    peak = torch.empty(shape, dtype=torch.float32)
    total, squares = torch.empty(shape, dtype=torch.float64), torch.empty(shape, dtype=torch.float64)
    _library().moments(
        native.number(),
        rows,
        dense.data_ptr(),
        peak.data_ptr(),
        total.data_ptr(),
        squares.data_ptr(),
        torch.get_num_threads(),
    )
    return peak, total, squares


def tail_count(x: Tensor, threshold: Tensor) -> Tensor:
    dense, rows = _rows(x)
    threshold = threshold.contiguous()
    counts = torch.empty([1, x.shape[1], *(1,) * (x.dim() - 2)], dtype=torch.int64)
    channel = 1 if threshold.numel() > 1 else 0
    _library().tail_count(
        native.number(), rows, dense.data_ptr(), threshold.data_ptr(), channel, counts.data_ptr(), torch.get_num_threads()
    )
    return counts


def dot_terms(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    dense, rows = _rows(x, per_sample=scale.shape[0] > 1)
    q = values if values.stride() == dense.stride() else torch.empty_like(dense, dtype=torch.int8).copy_(values)
    scale = scale.contiguous()
    terms = torch.empty(3, dtype=torch.float64)
    _library().dot_terms(
        native.number(),
        rows,
        dense.data_ptr(),
        q.data_ptr(),
        scale.data_ptr(),
        *_strides(scale),
        terms.data_ptr(),
        torch.get_num_threads(),
    )
    return terms


def cosine_terms(x: Tensor, clips: Tensor) -> Tensor:
    dense, rows = _rows(x)
    clips = clips.contiguous()
    terms = torch.empty(clips.shape[0], 3, dtype=torch.float64)
    _library().cosine_terms(
        native.number(), rows, dense.data_ptr(), clips.data_ptr(), clips.shape[0], terms.data_ptr(), torch.get_num_threads()
    )
    return terms


def cosine_slope_terms(x: Tensor, clip: Tensor) -> Tensor:
    dense, rows = _rows(x)
    terms = torch.empty(5, dtype=torch.float64)
    _library().cosine_slope_terms(
        native.number(), rows, dense.data_ptr(), float(clip), terms.data_ptr(), torch.get_num_threads()
    )
    return terms


def explain(
    product: str,
    x_size: list[int],
    w_size: list[int],
    out_size: list[int],
    geometry: tuple[list[int], list[int], list[int], int],
) -> str:
    """Which algorithm the planner picks for a product ("output", "grad_input", "grad_weight") of this shape, and why."""
    number = native.number()
    if number is None:
        return "the reference path runs plain PyTorch"
    kind = ("output", "grad_input", "grad_weight").index(product)
    algorithm, reason = _library().explain(number, kind, _shape(x_size, w_size, out_size, geometry))
    return f"{algorithm}: {reason}"
