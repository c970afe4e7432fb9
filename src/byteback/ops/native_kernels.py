# SPDX-License-Identifier: Apache-2.0
"""From tensors to the native library: layouts, addresses, results. Same functions as reference.py and statistics.py.

The library reads activations as N, D, H, W, C and weights as K, T, R, S, C, dense. A channels_last tensor is that already;
others are copied, contiguous ones by the library's own transpose. 1-D and 2-D convolutions are 3-D ones with sizes of 1.
The operators have checked the arguments; addresses.py checks what a kernel will read, unless a plan has proved it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.addresses import CPU, dense, flat, known, new
from byteback.ops import layout, native, pool
from byteback.ops.scale_rule import combine_scales

# Bound once: after a large layer every look-up in PyTorch's module is a miss of the cache.
_threads = torch.get_num_threads
_FLOAT32, _FLOAT64, _INT64, _INT8 = torch.float32, torch.float64, torch.int64, torch.int8


def _library() -> Any:
    return native.library


_TILE = 16  # bytes on either side of a tile in csrc/transpose_avx2.cpp


def _transpose(path: int, source: Tensor, result: Tensor, batch: int, rows: int, columns: int) -> Tensor:
    """Dense matrices (rows, columns) as (columns, rows), each."""
    count = batch * rows * columns
    addresses = dense(source, source.dtype, count), known(result)
    _library().transpose(path, batch, rows, columns, source.element_size(), *addresses, torch.get_num_threads())
    return result


def _channels_last(path: int, x: Tensor) -> Tensor:
    """x (N, C, ...) as a dense (N, ..., C) tensor; only its memory counts, not its shape."""
    n, c = x.shape[:2]
    pixels = math.prod(x.shape[2:])
    if pixels < _TILE or not x.is_contiguous():  # the taps of a 3x3 weight fill no tile: PyTorch's copy is faster
        return x.movedim(1, -1).contiguous()
    return _transpose(path, x, pool.empty_like(x, x.dtype), n, c, pixels)


def _three(values: Any, fill: int) -> list[int]:
    """Per-axis numbers of a 1-D, 2-D or 3-D convolution, filled up in front to three."""
    return [fill] * (3 - len(values)) + list(values)


def _shape(
    x_size: Sequence[int],
    w_size: Sequence[int],
    out_size: Sequence[int],
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


class Plan(NamedTuple):
    """How a product of given shapes and strides is served: found once, used at every call."""

    product: str
    shape: tuple[int, ...]  # csrc/types.h's ConvShape
    size: tuple[int, ...]  # of the result
    strides: tuple[int, ...]
    a_is_last: bool  # whether a lies in memory as the library reads it, else it is transposed; b and the result likewise
    b_is_last: bool
    result_is_last: bool
    single: bool  # one scale on either side
    is_plain: bool  # all of that: nothing is to be done but to multiply
    groups: int
    channels: int  # K


def plan(product: str, size: list[int], a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *rest: Any) -> Plan:
    """The plan of a product ("output", "grad_input", "grad_weight") whose result has this size; arguments as the operator's."""
    geometry = rest[-4:]
    sizes = {
        "output": (a.shape, b.shape, size),
        "grad_input": (size, b.shape, a.shape),
        "grad_weight": (b.shape, size, a.shape),
    }[product]
    strides = layout.empty_like_product(size, a, b).stride()
    a_is_last, b_is_last = layout.is_last_dense(a.shape, a.stride()), layout.is_last_dense(b.shape, b.stride())
    result_is_last = layout.is_last_dense(size, strides)
    single = a_scale.numel() == 1 and b_scale.numel() == 1
    return Plan(
        product,
        tuple(_shape(*sizes, geometry)),
        tuple(size),
        strides,
        a_is_last,
        b_is_last,
        result_is_last,
        single,
        single and a_is_last and b_is_last and result_is_last,
        geometry[3],
        sizes[1][0],
    )


def laid_out(
    path: int, plan: Plan, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor
) -> tuple[Tensor, Tensor, tuple[int, int], tuple[int, int], Tensor]:
    """Both operands channels last, the addresses of their scales, the strides of those, and the tensor that holds them.

    Two single scales have an address each; a second address of 0 says that the first one has their products.
    """
    a = a if plan.a_is_last else _channels_last(path, a)
    b = b if plan.b_is_last else _channels_last(path, b)
    if plan.single:
        return a, b, (known(a_scale), known(b_scale)), (0, 0), a_scale
    scales = combine_scales(plan.product, a_scale, b_scale, plan.groups, plan.channels).contiguous()
    rows, columns = scales.shape[:2]
    strides = (columns if rows > 1 else 0, 1 if columns > 1 else 0)
    return a, b, (flat(scales, _FLOAT32, rows * columns), 0), strides, scales


def run(path: int, plan: Plan, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """The product in the memory format that the plan says."""
    result = pool.empty(plan.size, plan.strides, _FLOAT32, CPU)
    function = getattr(_library(), _FUNCTIONS[plan.product])
    if plan.is_plain:
        operands = known(a), known(b), known(a_scale), known(b_scale)
        native.last_kernel = function(path, plan.shape, *operands, 0, 0, known(result), _threads())
        return result
    a, b, addresses, strides, alive = laid_out(path, plan, a, a_scale, b, b_scale)
    buffer = result if plan.result_is_last else pool.empty_like(result)
    native.last_kernel = function(path, plan.shape, known(a), known(b), *addresses, *strides, known(buffer), _threads())
    del alive  # the scales, until here
    if buffer is result:
        return result
    return _transpose(path, buffer, result, plan.size[0], math.prod(plan.size[2:]), plan.size[1])


_FUNCTIONS = {"output": "conv_output", "grad_input": "conv_grad_input", "grad_weight": "conv_grad_weight"}


def matmul_int8(path: int, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """A 1x1 convolution: each row of a is an image of one pixel, each column of b an output channel."""
    rows, depth = a.shape
    columns = b.shape[1]
    shape = (rows, depth, columns, 1, *(1,) * 9, *(1, 1, 1), *(0, 0, 0), *(1, 1, 1))
    strides, single = (columns, 1), a_scale.numel() == 1 and b_scale.numel() == 1
    product = Plan("output", shape, (rows, columns), strides, True, True, True, single, single, 1, columns)
    return run(path, product, a.contiguous(), a_scale, b.t().contiguous(), b_scale)


def noise_key(seed: Tensor, layer: Tensor, count: Tensor, rank: int) -> Tensor:
    key = new(2, _INT64)
    counters = flat(seed, _INT64, 1), flat(layer, _INT64, 1), flat(count, _INT64, 1)
    _library().noise_key(*counters, rank, known(key))
    return key


# ---- quantize and its statistics -------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _rows_of(shape: tuple[int, ...], strides: tuple[int, ...], per_sample: bool) -> tuple[bool, tuple[int, ...]]:
    """Whether a tensor is channels last, and csrc/elementwise.h's Rows: outer, inner, channels and their strides."""
    n, c = shape[:2]
    pixels = math.prod(shape[2:])
    if not layout.is_last_dense(shape, strides):
        return False, (n, pixels, c, pixels * c, 1, pixels)
    return True, ((n, pixels, c, pixels * c, c, 1) if per_sample else (1, n * pixels, c, 0, c, 1))


def _rows(x: Tensor, per_sample: bool = False) -> tuple[Tensor, tuple[int, ...]]:
    """x, copied if it must be, and its layout."""
    last, rows = _rows_of(x.shape, x.stride(), per_sample)
    return (x if last else x.contiguous()), rows


def _strides(per_scale: Tensor) -> tuple[int, int]:
    """(per sample, per channel) strides of a dense clip or scale (N or 1, C or 1, 1, ...)."""
    return (per_scale.shape[1] if per_scale.shape[0] > 1 else 0), (1 if per_scale.shape[1] > 1 else 0)


def _like(x: Tensor, laid: Tensor, values: Tensor) -> Tensor:
    """Integers made of a dense copy of x, laid out as x asks for."""
    return values if laid is x else torch.empty_like(x, dtype=torch.int8).copy_(values)


def quantize(path: int, x: Tensor, clip: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    laid, rows = _rows(x, per_sample=clip.shape[0] > 1)
    clip = clip.contiguous()
    key = key if key is None else key.contiguous()
    values, scale = pool.empty_like(laid, _INT8), torch.empty_like(clip)
    counts, peak = new(2, _INT64), new((), _FLOAT32)
    count, clips = x.numel(), clip.numel()
    _library().quantize(
        path,
        rows,
        dense(laid, _FLOAT32, count),
        flat(clip, _FLOAT32, clips),
        *_strides(clip),
        clips,
        flat(key, _INT64, 2),
        known(values),
        known(scale),
        known(counts),
        known(peak),
        torch.get_num_threads(),
    )
    return _like(x, laid, values), scale, counts, peak


class QuantizePlan(NamedTuple):
    """How `quantize_max` treats tensors of a shape, strides and axis: found once, used at every call."""

    is_dense: bool  # in memory as the kernels read it, else it is copied first
    rows: tuple[int, ...]  # csrc/elementwise.h's Rows
    layouts: tuple[tuple[int, ...], ...]  # sizes and strides of the integers, then of the clip


def quantize_plan(x: Tensor, axis: int) -> QuantizePlan:
    """The plan for x and an axis of -1, 0 or 1."""
    laid, rows = _rows(x, per_sample=axis == 0)
    layouts = (tuple(laid.shape), laid.stride(), *_clip_layout(x.shape, axis))
    return QuantizePlan(laid is x, rows, layouts)


def quantize_max(path: int, plan: QuantizePlan, x: Tensor, axis: int, key: Tensor | None) -> tuple[Tensor, ...]:
    laid = x if plan.is_dense else x.contiguous()
    key = key if key is None else key.contiguous()
    noise = flat(key, _INT64, 2)
    made = _library().quantize_max(path, plan.rows, known(laid), axis, noise, *plan.layouts, pool.limit, _threads())
    values, scale, clip, counts = map(pool.tensor_of, made)
    return _like(x, laid, values), scale, clip, counts


@lru_cache(maxsize=4096)
def _clip_layout(shape: tuple[int, ...], axis: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes = [size if dim == axis else 1 for dim, size in enumerate(shape)]
    return tuple(sizes), tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _empty_clip(x: Tensor, axis: int) -> Tensor:
    """One float for the whole of x (axis -1) or for each index of `axis`. With strides given, PyTorch is twice as fast."""
    return torch.empty_strided(*_clip_layout(x.shape, axis), dtype=_FLOAT32, device=CPU)


def absmax(path: int, x: Tensor, axis: int) -> Tensor:
    laid, rows = _rows(x, per_sample=axis == 0)
    result = _empty_clip(x, axis)
    _library().absmax(path, rows, dense(laid, _FLOAT32, x.numel()), known(result), axis, torch.get_num_threads())
    return result


def moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    laid, rows = _rows(x)
    shape = [1, x.shape[1], *(1,) * (x.dim() - 2)]
    peak, total, squares = new(shape, _FLOAT32), new(shape, _FLOAT64), new(shape, _FLOAT64)
    made = known(peak), known(total), known(squares)
    _library().moments(native.number(), rows, dense(laid, _FLOAT32, x.numel()), *made, torch.get_num_threads())
    return peak, total, squares


def tail_count(x: Tensor, threshold: Tensor) -> Tensor:
    laid, rows = _rows(x)
    threshold = threshold.contiguous()
    channels = x.shape[1]
    counts = new([1, channels, *(1,) * (x.dim() - 2)], _INT64)
    single = threshold.numel() == 1
    _library().tail_count(
        native.number(),
        rows,
        dense(laid, _FLOAT32, x.numel()),
        flat(threshold, _FLOAT32, 1 if single else channels),
        0 if single else 1,
        known(counts),
        torch.get_num_threads(),
    )
    return counts


def dot_terms(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    laid, rows = _rows(x, per_sample=scale.shape[0] > 1)
    q = values if values.stride() == laid.stride() else torch.empty_like(laid, dtype=_INT8).copy_(values)
    scale = scale.contiguous()
    terms = new(3, _FLOAT64)
    _library().dot_terms(
        native.number(),
        rows,
        dense(laid, _FLOAT32, x.numel()),
        dense(q, _INT8, x.numel()),
        flat(scale, _FLOAT32, math.prod(scale.shape[:2])),
        *_strides(scale),
        known(terms),
        torch.get_num_threads(),
    )
    return terms


def cosine_terms(x: Tensor, clips: Tensor, stochastic: bool) -> Tensor:
    return _cosine_terms(x, clips, stochastic, new((clips.shape[0], 3), _FLOAT64))


def channel_cosine_terms(x: Tensor, clips: Tensor, stochastic: bool) -> Tensor:
    return _cosine_terms(x, clips, stochastic, new((clips.shape[0], 3, x.shape[1]), _FLOAT64))


def _cosine_terms(x: Tensor, clips: Tensor, stochastic: bool, terms: Tensor) -> Tensor:
    laid, rows = _rows(x)
    clips, count, per_channel = clips.contiguous(), clips.shape[0], clips.dim() == 2
    given = dense(laid, _FLOAT32, x.numel()), flat(clips, _FLOAT32, count * (x.shape[1] if per_channel else 1))
    options = count, per_channel, stochastic
    _library().cosine_terms(native.number(), rows, *given, *options, known(terms), torch.get_num_threads())
    return terms


def cosine_slope_terms(x: Tensor, clip: Tensor) -> Tensor:
    laid, rows = _rows(x)
    terms = new(5, _FLOAT64)
    given = dense(laid, _FLOAT32, x.numel()), clip.item()
    _library().cosine_slope_terms(native.number(), rows, *given, known(terms), torch.get_num_threads())
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
