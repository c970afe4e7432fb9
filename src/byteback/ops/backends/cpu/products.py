# SPDX-License-Identifier: Apache-2.0
"""The integer products on the native library: layouts, addresses, results.

The library reads activations as N, D, H, W, C and weights as K, T, R, S, C, dense. A channels_last tensor is that already;
others are copied, contiguous ones by the library's own transpose. 1-D and 2-D convolutions are 3-D ones with sizes of 1.
The operator has checked the arguments, and the key of its plan proves what a kernel will read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.ops.backends import reference
from byteback.ops.backends.cpu import allocator, library
from byteback.ops.backends.cpu.addresses import CPU, dense, flat, known
from byteback.ops.contract import layout
from byteback.ops.contract.scale_rule import combine_scales
from byteback.ops.types import Geometry, ProductCall

_native: Any = library.native
# Bound once: after a large layer every look-up in PyTorch's module is a miss of the cache.
_threads = torch.get_num_threads
_FLOAT32 = torch.float32

_TILE = 16  # bytes on either side of a tile in csrc/elementwise/x86/transpose_avx2.cpp


def _transpose(path: int, source: Tensor, result: Tensor, batch: int, rows: int, columns: int) -> Tensor:
    """Dense matrices (rows, columns) as (columns, rows), each."""
    _native.transpose(
        path,
        batch=batch,
        rows=rows,
        columns=columns,
        bytes=source.element_size(),
        source=dense(source, source.dtype, batch * rows * columns),
        result=known(result),
        threads=_threads(),
    )
    return result


def _channels_last(path: int, x: Tensor) -> Tensor:
    """x (N, C, ...) as a dense (N, ..., C) tensor; only its memory counts, not its shape."""
    n, c = x.shape[:2]
    pixels = math.prod(x.shape[2:])
    if pixels < _TILE or not x.is_contiguous():  # the taps of a 3x3 weight fill no tile: PyTorch's copy is faster
        return x.movedim(1, -1).contiguous()
    return _transpose(path, x, allocator.empty_like(x, x.dtype), n, c, pixels)


def _three(values: Sequence[int], fill: int) -> list[int]:
    """Per-axis numbers of a 1-D, 2-D or 3-D convolution, filled up in front to three."""
    return [fill] * (3 - len(values)) + list(values)


def conv_shape(x_size: Sequence[int], w_size: Sequence[int], out_size: Sequence[int], geometry: Geometry) -> Any:
    """csrc/core/types.h's ConvShape."""
    stride, padding, dilation, groups = geometry
    return _native.ConvShape(
        batch=x_size[0],
        in_channels=x_size[1],
        out_channels=w_size[0],
        groups=groups,
        input=_three(x_size[2:], 1),
        kernel=_three(w_size[2:], 1),
        output=_three(out_size[2:], 1),
        stride=_three(stride, 1),
        padding=_three(padding, 0),
        dilation=_three(dilation, 1),
    )


class Plan(NamedTuple):
    """How a product of given shapes and strides runs: made once, used at every call."""

    function: Any  # of the native library
    shape: Any  # csrc/core/types.h's ConvShape
    size: tuple[int, ...]  # of the result
    strides: tuple[int, ...]
    a_is_last: bool  # whether a is in memory as the library reads it, else it is transposed; b and the result likewise
    b_is_last: bool
    result_is_last: bool
    single: bool  # one scale for either operand
    is_plain: bool  # all of that: nothing to do but multiply


_FUNCTIONS = {"output": "conv_output", "grad_input": "conv_grad_input", "grad_weight": "conv_grad_weight"}


def product_plan(path: int, call: ProductCall, a: Tensor, b: Tensor) -> Plan | None:
    """The plan of a product; None for an empty one, which the reference computes."""
    if 0 in a.shape or 0 in b.shape:
        return None
    a_is_last, b_is_last = layout.is_last_dense(a.shape, a.stride()), layout.is_last_dense(b.shape, b.stride())
    result_is_last = layout.is_last_dense(call.size, call.strides)
    return Plan(
        getattr(_native, _FUNCTIONS[call.kind]),
        conv_shape(call.x_size, call.w_size, call.out_size, call.geometry),
        call.size,
        call.strides,
        a_is_last,
        b_is_last,
        result_is_last,
        call.single,
        call.single and a_is_last and b_is_last and result_is_last,
    )


def laid_out(
    path: int, call: ProductCall, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor
) -> tuple[Tensor, Tensor, dict[str, int], Tensor]:
    """Both operands channels last, where their scales are (as in csrc/bindings/structs.h's Operands), and what holds them."""
    plan: Plan = call.plan
    a = a if plan.a_is_last else _channels_last(path, a)
    b = b if plan.b_is_last else _channels_last(path, b)
    if plan.single:
        return a, b, {"a_scale": known(a_scale), "b_scale": known(b_scale)}, a_scale
    scales = combine_scales(call.kind, a_scale, b_scale, call.groups, call.channels).contiguous()
    rows, columns = scales.shape[:2]
    row, column = columns if rows > 1 else 0, 1 if columns > 1 else 0
    return a, b, {"a_scale": flat(scales, _FLOAT32, rows * columns), "b_scale": 0, "row": row, "column": column}, scales


def product(path: int, call: ProductCall, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """The product in the memory format that the plan says."""
    plan: Plan | None = call.plan
    if plan is None:
        return reference.product(call, a, a_scale, b, b_scale)
    result = allocator.empty(plan.size, plan.strides, _FLOAT32, CPU)
    if plan.is_plain:
        library.last_kernel = plan.function(
            path,
            plan.shape,
            a=known(a),
            b=known(b),
            a_scale=known(a_scale),
            b_scale=known(b_scale),
            result=known(result),
            threads=_threads(),
        )
        return result
    a, b, addresses, alive = laid_out(path, call, a, a_scale, b, b_scale)
    buffer = result if plan.result_is_last else allocator.empty_like(result)
    library.last_kernel = plan.function(
        path, plan.shape, a=known(a), b=known(b), **addresses, result=known(buffer), threads=_threads()
    )
    del alive  # the scales, until here
    if buffer is result:
        return result
    return _transpose(path, buffer, result, plan.size[0], math.prod(plan.size[2:]), plan.size[1])


def matmul_int8(path: int, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """A 1x1 convolution: each row of a is an image of one pixel, each column of b an output channel."""
    rows, columns = a.shape[0], b.shape[1]
    if not a.numel() or not b.numel():
        return reference.matmul_int8(a, a_scale, b, b_scale)
    images, filters = a.contiguous(), b.t().contiguous()
    single = a_scale.numel() == 1 and b_scale.numel() == 1
    call = ProductCall("output", (rows, columns), (columns, 1), images, filters, ((), (), (), 1), single)
    call.plan = product_plan(path, call, images, filters)
    return product(path, call, images, a_scale, filters, b_scale)


def explain(
    path: int, product: str, x_size: Sequence[int], w_size: Sequence[int], out_size: Sequence[int], geometry: Geometry
) -> str:
    """Which algorithm the planner picks for a product of this shape, and why."""
    kind = ("output", "grad_input", "grad_weight").index(product)
    algorithm, reason = _native.explain(path, kind, conv_shape(x_size, w_size, out_size, geometry))
    return f"{algorithm}: {reason}"
