# SPDX-License-Identifier: Apache-2.0
"""The integer products in the native library.

The library reads activations as N, D, H, W, C and weights as K, T, R, S, C, dense. channels_last tensors have this layout.
Others are copied, contiguous ones by a transpose of the library. 1-D and 2-D convolutions are 3-D ones with sizes of 1. The
operator has checked the arguments, and the key of its plan proves what a kernel will read.
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
# Bound once: after a large layer every attribute look-up in torch is a cache miss.
_threads = torch.get_num_threads
_FLOAT32 = torch.float32

_TILE = 16  # bytes per side of a tile in csrc/elementwise/x86/transpose_avx2.cpp


def _transpose(path: int, source: Tensor, result: Tensor, batch: int, rows: int, columns: int) -> Tensor:
    """Transposes a batch of dense matrices (rows, columns)."""
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


def rows_last(path: int, x: Tensor) -> Tensor:
    """Returns a tensor whose memory is x (N, C, ...) as dense (N, ..., C). Its shape has no meaning."""
    n, c = x.shape[:2]
    pixels = math.prod(x.shape[2:])
    if pixels < _TILE or not x.is_contiguous():  # a 3x3 weight does not fill a tile: PyTorch's copy is faster
        return x.movedim(1, -1).contiguous()
    return _transpose(path, x, allocator.empty_like(x, x.dtype), n, c, pixels)


def _three(values: Sequence[int], fill: int) -> list[int]:
    """Returns the numbers per axis of a 1-D, 2-D or 3-D convolution as three, with `fill` in front."""
    return [fill] * (3 - len(values)) + list(values)


def conv_shape(x_size: Sequence[int], w_size: Sequence[int], out_size: Sequence[int], geometry: Geometry) -> Any:
    """Returns the ConvShape (csrc/core/types.h)."""
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
    """How to run a product of given shapes and strides. It is created once and used at every call."""

    function: Any  # of the native library
    shape: Any  # ConvShape (csrc/core/types.h)
    size: tuple[int, ...]  # of the result
    strides: tuple[int, ...]
    a_is_last: bool  # whether a has the layout that the library reads, else it is transposed; b and the result likewise
    b_is_last: bool
    result_is_last: bool
    single: bool  # each operand has a single scale
    is_plain: bool  # all four are True: the operands need no preparation


_FUNCTIONS = {"output": "conv_output", "grad_input": "conv_grad_input", "grad_weight": "conv_grad_weight"}


def product_plan(path: int, call: ProductCall, a: Tensor, b: Tensor) -> Plan | None:
    """Returns the plan of a product; None for an empty product, which the reference computes."""
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
    """Returns both operands channels last, the addresses of their scales (Operands in csrc/bindings/structs.h), and a tensor
    that keeps the scales alive."""
    plan: Plan = call.plan
    a = a if plan.a_is_last else rows_last(path, a)
    b = b if plan.b_is_last else rows_last(path, b)
    if plan.single:
        return a, b, {"a_scale": known(a_scale), "b_scale": known(b_scale)}, a_scale
    scales = combine_scales(call.kind, a_scale, b_scale, call.groups, call.channels).contiguous()
    rows, columns = scales.shape[:2]
    row, column = columns if rows > 1 else 0, 1 if columns > 1 else 0
    return a, b, {"a_scale": flat(scales, _FLOAT32, rows * columns), "b_scale": 0, "row": row, "column": column}, scales


def product(path: int, call: ProductCall, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """Returns the product in the memory format of the plan."""
    plan: Plan | None = call.plan
    if plan is None:
        return reference.product(call, a, a_scale, b, b_scale)
    # The gradient of a weight is needed until the optimizer has read it, and often through the next forward.
    result = allocator.empty(plan.size, plan.strides, _FLOAT32, CPU, lasts=call.kind == "grad_weight")
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
    del alive  # the scales must exist until here
    if buffer is result:
        return result
    return _transpose(path, buffer, result, plan.size[0], math.prod(plan.size[2:]), plan.size[1])


def matmul_int8(path: int, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """Computes the product as a 1x1 convolution: each row of a is an image of one pixel, each column of b an output channel."""
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
    """Returns the algorithm that the planner chooses for a product of this shape, and why."""
    kind = ("output", "grad_input", "grad_weight").index(product)
    algorithm, reason = _native.explain(path, kind, conv_shape(x_size, w_size, out_size, geometry))
    return f"{algorithm}: {reason}"
