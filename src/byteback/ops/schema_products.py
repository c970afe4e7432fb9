# SPDX-License-Identifier: Apache-2.0
"""The three products of a convolution and the matrix product as operators: what may be asked of them, and who serves it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from byteback.ops import layout, native_kernels, reference
from byteback.ops.scale_rule import check_scale
from byteback.ops.schema import check_int8, define, path_of, plainly, remembered

_plans: dict[tuple[Any, ...], native_kernels.Plan] = {}


def _planned(product: str, check: Callable[..., list[int]], arguments: tuple[Any, ...]) -> native_kernels.Plan:
    """The plan of a product, from the memory or made now, after `check` which returns the result's size.

    Whether a call is right, and how it is served, depends on shapes, strides and dtypes only: it is found out once for each.
    The native kernels then read the operands without another look. That all of them are on the CPU was found before
    (`path_of`, `path_for`), at each call; strides of scales do not count, as single ones have none and others are combined.
    """
    a, a_scale, b, b_scale, *rest, groups = arguments
    operands = a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype
    key = (product, groups, *operands, a_scale.shape, a_scale.dtype, b_scale.shape, b_scale.dtype, *map(tuple, rest))
    return _plans.get(key) or remembered(_plans, key, native_kernels.plan(product, check(*arguments), *arguments))


# ---- checks at the door ----------------------------------------------------------------------------------------------


_MOST_ELEMENTS = 2**60  # of a result: its bytes are counted in an int64


def _output_size(
    op: str,
    input_size: Sequence[int],
    weight_size: Sequence[int],
    geometry: tuple[list[int], list[int], list[int], int],
) -> list[int]:
    """The output's shape, after everything about the geometry was checked."""
    stride, padding, dilation, groups = geometry
    spatial = len(input_size) - 2
    if spatial not in (1, 2, 3) or len(weight_size) != spatial + 2:
        raise ValueError(
            f"{op}: input has shape {tuple(input_size)} and weight {tuple(weight_size)}; a convolution takes N, C and one "
            "to three spatial axes on both sides. Add the missing axis."
        )
    for name, values, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        if len(values) != spatial or not all(value >= least for value in values):
            raise ValueError(
                f"{op}: {name} is {list(values)}; it needs {spatial} integers of at least {least}, one for each spatial axis."
            )
    if groups < 1 or weight_size[0] % groups or input_size[1] != weight_size[1] * groups:
        raise ValueError(
            f"{op}: input has {input_size[1]} channels, weight has shape {tuple(weight_size)} and groups is {groups}; the "
            "input needs weight.shape[1] * groups channels and groups must divide weight.shape[0]."
        )
    size = [input_size[0], weight_size[0]]
    for i in range(spatial):
        reach = dilation[i] * (weight_size[2 + i] - 1) + 1
        length = input_size[2 + i] + 2 * padding[i]
        if reach > length or weight_size[2 + i] < 1:
            raise ValueError(
                f"{op}: the kernel reaches over {reach} pixels on spatial axis {i}, but the padded input has only {length} "
                "there, so no output pixel exists. Use a larger image, more padding or a smaller kernel."
            )
        size.append((length - reach) // stride[i] + 1)
    if all(isinstance(length, int) for length in size) and math.prod(size) > _MOST_ELEMENTS:
        raise ValueError(
            f"{op}: input has shape {tuple(input_size)} and padding is {list(padding)}, so the output would have shape "
            f"{tuple(size)}; no memory holds it. Use less padding."
        )
    return size


def _check_grad_output(op: str, g: Tensor, expected: list[int]) -> None:
    if list(g.shape) != expected:
        raise ValueError(
            f"{op}: grad_output has shape {tuple(g.shape)}, but this convolution's output has shape {tuple(expected)}; "
            "a gradient has the shape of what it is the gradient of. Check stride, padding, dilation and groups."
        )


# ---- the products ----------------------------------------------------------------------------------------------------


def _conv_checked(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, *geometry: Any) -> list[int]:
    op = "conv_int8"
    check_int8(op, input=x, weight=w)
    size = _output_size(op, x.shape, w.shape, geometry)
    check_scale(op, "output", "input", x, x_scale)
    check_scale(op, "output", "weight", w, w_scale)
    return size


def output_plan(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, *geometry: Any) -> native_kernels.Plan:
    """The checked plan of a convolution's output, for operators around it."""
    return _planned("output", _conv_checked, (x, x_scale, w, w_scale, *geometry))


def _conv(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, *geometry: Any) -> Tensor:
    arguments = (x, x_scale, w, w_scale, *geometry)
    path = path_of(x, x_scale, w, w_scale)
    if path is not None:
        return native_kernels.run(path, _planned("output", _conv_checked, arguments), x, x_scale, w, w_scale)
    size = _conv_checked(*arguments)
    if 0 in x.shape or 0 in w.shape:
        return layout.empty_like_product(size, x, w).zero_()
    return plainly(reference.conv_int8, *arguments)


def _conv_fake(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, *geometry: Any) -> Tensor:
    return layout.empty_like_product(_conv_checked(x, x_scale, w, w_scale, *geometry), x, w)


def _grad_input_checked(
    g: Tensor, g_scale: Tensor, w: Tensor, w_scale: Tensor, input_size: list[int], *geometry: Any
) -> list[int]:
    op = "conv_int8_grad_input"
    check_int8(op, grad_output=g, weight=w)
    _check_grad_output(op, g, _output_size(op, input_size, w.shape, geometry))
    depthwise = geometry[-1] == g.shape[1] == input_size[1]
    check_scale(op, "grad_input", "grad_output", g, g_scale, depthwise)
    check_scale(op, "grad_input", "weight", w, w_scale)
    return input_size


def _grad_input(g: Tensor, g_scale: Tensor, w: Tensor, w_scale: Tensor, *rest: Any) -> Tensor:
    arguments = (g, g_scale, w, w_scale, *rest)
    path = path_of(g, g_scale, w, w_scale)
    if path is not None:
        plan = _planned("grad_input", _grad_input_checked, arguments)
        return native_kernels.run(path, plan, g, g_scale, w, w_scale)
    _grad_input_checked(*arguments)
    return plainly(reference.conv_int8_grad_input, *arguments)


def _grad_input_fake(g: Tensor, g_scale: Tensor, w: Tensor, w_scale: Tensor, input_size: list[int], *geometry: Any) -> Tensor:
    _grad_input_checked(g, g_scale, w, w_scale, input_size, *geometry)
    return layout.empty_like_product(input_size, g, w)


def _grad_weight_checked(
    g: Tensor, g_scale: Tensor, x: Tensor, x_scale: Tensor, weight_size: list[int], *geometry: Any
) -> list[int]:
    op = "conv_int8_grad_weight"
    check_int8(op, grad_output=g, input=x)
    _check_grad_output(op, g, _output_size(op, x.shape, weight_size, geometry))
    check_scale(op, "grad_weight", "grad_output", g, g_scale)
    check_scale(op, "grad_weight", "input", x, x_scale)
    return weight_size


def _grad_weight(g: Tensor, g_scale: Tensor, x: Tensor, x_scale: Tensor, *rest: Any) -> Tensor:
    arguments = (g, g_scale, x, x_scale, *rest)
    path = path_of(g, g_scale, x, x_scale)
    if path is not None:
        plan = _planned("grad_weight", _grad_weight_checked, arguments)
        return native_kernels.run(path, plan, g, g_scale, x, x_scale)
    _grad_weight_checked(*arguments)
    return plainly(reference.conv_int8_grad_weight, *arguments)


def _grad_weight_fake(g: Tensor, g_scale: Tensor, x: Tensor, x_scale: Tensor, weight_size: list[int], *geometry: Any) -> Tensor:
    _grad_weight_checked(g, g_scale, x, x_scale, weight_size, *geometry)
    return layout.empty_like_product(weight_size, g, x)


_GEOMETRY = "int[] stride, int[] padding, int[] dilation, int groups"
conv_int8 = define(f"conv_int8(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, {_GEOMETRY}) -> Tensor", _conv, _conv_fake)
conv_int8_grad_input = define(
    f"conv_int8_grad_input(Tensor g, Tensor g_scale, Tensor w, Tensor w_scale, SymInt[] input_size, {_GEOMETRY}) -> Tensor",
    _grad_input,
    _grad_input_fake,
)
conv_int8_grad_weight = define(
    f"conv_int8_grad_weight(Tensor g, Tensor g_scale, Tensor x, Tensor x_scale, SymInt[] weight_size, {_GEOMETRY}) -> Tensor",
    _grad_weight,
    _grad_weight_fake,
)


def _check_matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    check_int8("matmul_int8", a=a, b=b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"matmul_int8: a has shape {tuple(a.shape)} and b {tuple(b.shape)}; it takes (M, K) and (K, N). "
            "Flatten or transpose the operands."
        )
    for name, tensor, scale, axis in (("a", a, a_scale, 0), ("b", b, b_scale, 1)):
        shape = [1, 1]
        shape[axis] = tensor.shape[axis]
        if list(scale.shape) not in ([1, 1], shape) or scale.dtype != torch.float32:
            raise ValueError(
                f"matmul_int8: {name}_scale has shape {tuple(scale.shape)} and dtype {scale.dtype}; the product sums over K, "
                f"and terms with different scales cannot be added, so it must be float32 of shape (1, 1) or {tuple(shape)}."
            )


def _matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    _check_matmul(a, a_scale, b, b_scale)
    path = path_of(a, a_scale, b, b_scale)
    if path is not None:
        return native_kernels.matmul_int8(path, a, a_scale, b, b_scale)
    return plainly(reference.matmul_int8, a, a_scale, b, b_scale)


def _matmul_fake(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    _check_matmul(a, a_scale, b, b_scale)
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


matmul_int8 = define("matmul_int8(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale) -> Tensor", _matmul, _matmul_fake)
