# SPDX-License-Identifier: Apache-2.0
"""The integer products as operators: the three products of a convolution, and the matrix product.

Whether a call is valid, and how a backend runs it, depends only on shapes, strides and dtypes. So each combination is checked
once and cached as a `ProductCall`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from byteback.ops.backends import meta, paths
from byteback.ops.backends.cpu import products as cpu_products
from byteback.ops.backends.registry import Backend, backend_for, backend_on
from byteback.ops.checks import check_int8
from byteback.ops.contract import layout, packing
from byteback.ops.contract.geometry import Axes, sizes
from byteback.ops.contract.geometry import geometry as checked_geometry
from byteback.ops.contract.scale_rule import check_scale
from byteback.ops.dispatch import define, remembered
from byteback.ops.types import Geometry, ProductCall

_calls: dict[tuple[Any, ...], ProductCall] = {}


def _called(backend: Backend, kind: str, check: Callable[..., list[int]], arguments: tuple[Any, ...]) -> ProductCall:
    """Returns the checked call of a product, from the cache or new. `check` checks the arguments and returns the result's size.

    A native kernel reads the operands without another check. They are on the CPU: choosing the backend has checked this, and
    the backend is part of the key. Strides of scales are not in the key: a single scale has none, others are combined.
    """
    a, a_scale, b, b_scale, *rest, groups = arguments
    operands = a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype
    scales = a_scale.shape, a_scale.dtype, b_scale.shape, b_scale.dtype
    key = (backend, kind, groups, *operands, *scales, *map(tuple, rest))
    found = _calls.get(key)
    if found is not None:
        return found
    size = check(*arguments)
    stride, padding, dilation = map(tuple, rest[-3:])
    single = a_scale.numel() == 1 and b_scale.numel() == 1
    strides = layout.empty_like_product(size, a, b).stride()
    call = ProductCall(kind, size, strides, a, b, (stride, padding, dilation, groups), single)
    call.plan = backend.product_plan(call, a, b)
    return remembered(_calls, key, call)


# ---- checks ----------------------------------------------------------------------------------------------------------


_META = torch.device("meta")
_MOST_ELEMENTS = 2**60  # of a result, so that its number of bytes fits into int64


def _output_size(
    op: str,
    input_size: Sequence[int],
    weight_size: Sequence[int],
    geometry: tuple[list[int], list[int], list[int], int],
) -> list[int]:
    """Checks the geometry and returns the shape of the output."""
    stride, padding, dilation, groups = geometry
    spatial = len(input_size) - 2
    if spatial not in (1, 2, 3) or len(weight_size) != spatial + 2:
        raise ValueError(
            f"{op}: input has shape {tuple(input_size)} and weight {tuple(weight_size)}, but both must have two axes and "
            "then the same number of spatial axes, 1 to 3. Add the missing axis."
        )
    for name, values, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        if len(values) != spatial or not all(value >= least for value in values):
            raise ValueError(
                f"{op}: {name} is {list(values)}, but must be {spatial} integers of at least {least}, one per spatial axis."
            )
    if groups < 1 or weight_size[0] % groups or input_size[1] != weight_size[1] * groups:
        raise ValueError(
            f"{op}: input has {input_size[1]} channels, weight has shape {tuple(weight_size)} and groups is {groups}, but the "
            "input must have weight.shape[1] * groups channels, and groups must divide weight.shape[0]."
        )
    size = [input_size[0], weight_size[0]]
    for i in range(spatial):
        reach = dilation[i] * (weight_size[2 + i] - 1) + 1
        length = input_size[2 + i] + 2 * padding[i]
        if reach > length or weight_size[2 + i] < 1:
            raise ValueError(
                f"{op}: the kernel covers {reach} pixels on spatial axis {i}, but the padded input has only {length}, so the "
                "output would be empty. Use a larger image, more padding or a smaller kernel."
            )
        size.append((length - reach) // stride[i] + 1)
    if all(isinstance(length, int) for length in size) and math.prod(size) > _MOST_ELEMENTS:
        raise ValueError(
            f"{op}: input has shape {tuple(input_size)} and padding is {list(padding)}, so the output would have shape "
            f"{tuple(size)}, which does not fit into memory. Use less padding."
        )
    return size


def _check_grad_output(op: str, g: Tensor, expected: list[int]) -> None:
    if list(g.shape) != expected:
        raise ValueError(
            f"{op}: grad_output has shape {tuple(g.shape)}, but must have the shape of the convolution's output, "
            f"{tuple(expected)}. Check stride, padding, dilation and groups."
        )


# ---- operators -------------------------------------------------------------------------------------------------------


def _conv_checked(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, *geometry: Any) -> list[int]:
    op = "conv_int8"
    check_int8(op, input=x, weight=w)
    size = _output_size(op, x.shape, w.shape, geometry)
    check_scale(op, "output", "input", x, x_scale)
    check_scale(op, "output", "weight", w, w_scale)
    return size


def output_call(backend: Backend, x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, geometry: Geometry) -> ProductCall:
    """Returns the checked call of the output of a convolution, for operators that include it."""
    return _called(backend, "output", _conv_checked, (x, x_scale, w, w_scale, *geometry))


def _conv(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, *geometry: Any) -> Tensor:
    backend = backend_for("conv_int8", x, x_scale, w, w_scale)
    call = _called(backend, "output", _conv_checked, (x, x_scale, w, w_scale, *geometry))
    return backend.product(call, x, x_scale, w, w_scale)


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
    backend = backend_for("conv_int8_grad_input", g, g_scale, w, w_scale)
    call = _called(backend, "grad_input", _grad_input_checked, (g, g_scale, w, w_scale, *rest))
    return backend.product(call, g, g_scale, w, w_scale)


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
    backend = backend_for("conv_int8_grad_weight", g, g_scale, x, x_scale)
    rank = len(rest[0])
    if x.dim() > rank or g.dim() > rank:
        return _grad_weight_packed(backend, g, g_scale, x, x_scale, *rest)
    call = _called(backend, "grad_weight", _grad_weight_checked, (g, g_scale, x, x_scale, *rest))
    return backend.product(call, g, g_scale, x, x_scale)


def _grad_weight_packed(backend: Backend, g: Tensor, g_scale: Tensor, x: Tensor, x_scale: Tensor, *rest: Any) -> Tensor:
    """grad_weight if g, x or both are packed by 16 images. A backend without kernels for this gets plain copies."""
    op, rank = "conv_int8_grad_weight", len(rest[0])
    images = packing.images_of(rank, g, x)
    plain = [packing.stand_in(op, operand, rank, images, _META) for operand in (g, x)]
    call = _called(backend, "grad_weight", _grad_weight_checked, (plain[0], g_scale, plain[1], x_scale, *rest))
    own = getattr(backend, "grad_weight_packed", None)
    if own is not None:
        return own(call, g, g_scale, x, x_scale)
    a, b = (packing.unpacked(one, images) if packing.is_packed(one, rank) else one for one in (g, x))
    return backend.product(call, a, g_scale, b, x_scale)


def _grad_weight_fake(g: Tensor, g_scale: Tensor, x: Tensor, x_scale: Tensor, weight_size: list[int], *geometry: Any) -> Tensor:
    op, rank = "conv_int8_grad_weight", len(weight_size)
    images = packing.images_of(rank, g, x)
    g, x = (packing.stand_in(op, operand, rank, images, operand.device) for operand in (g, x))
    _grad_weight_checked(g, g_scale, x, x_scale, weight_size, *geometry)
    return layout.empty_like_product(weight_size, g, x)


def _check_matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    check_int8("matmul_int8", a=a, b=b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"matmul_int8: a has shape {tuple(a.shape)} and b {tuple(b.shape)}, but they must be (M, K) and (K, N). "
            "Flatten or transpose the operands."
        )
    for name, tensor, scale, axis in (("a", a, a_scale, 0), ("b", b, b_scale, 1)):
        shape = [1, 1]
        shape[axis] = tensor.shape[axis]
        if list(scale.shape) not in ([1, 1], shape) or scale.dtype != torch.float32:
            raise ValueError(
                f"matmul_int8: {name}_scale has shape {tuple(scale.shape)} and dtype {scale.dtype}, but must be float32 of "
                f"shape (1, 1) or {tuple(shape)}: the product sums over K, and terms with different scales cannot be added."
            )


def _matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    _check_matmul(a, a_scale, b, b_scale)
    return backend_for("matmul_int8", a, a_scale, b, b_scale).matmul_int8(a, a_scale, b, b_scale)


def _matmul_fake(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    _check_matmul(a, a_scale, b, b_scale)
    return meta.matmul_int8(a, a_scale, b, b_scale)


_GEOMETRY = "int[] stride, int[] padding, int[] dilation, int groups"
_conv_operator = define(
    f"conv_int8(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, {_GEOMETRY}) -> Tensor", _conv, _conv_fake
)
_grad_input_operator = define(
    f"conv_int8_grad_input(Tensor g, Tensor g_scale, Tensor w, Tensor w_scale, SymInt[] input_size, {_GEOMETRY}) -> Tensor",
    _grad_input,
    _grad_input_fake,
)
_grad_weight_operator = define(
    f"conv_int8_grad_weight(Tensor g, Tensor g_scale, Tensor x, Tensor x_scale, SymInt[] weight_size, {_GEOMETRY}) -> Tensor",
    _grad_weight,
    _grad_weight_fake,
)
_matmul_operator = define("matmul_int8(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale) -> Tensor", _matmul, _matmul_fake)


# ---- the functions of byteback.ops -----------------------------------------------------------------------------------


def conv_int8(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    stride: Axes,
    padding: Axes,
    dilation: Axes,
    groups: int = 1,
) -> Tensor:
    """Returns output = (x ⋆ w) · (x_scale · w_scale): exact int8 convolution in one to three dimensions, float32 result.

    stride, padding and dilation are one integer for all spatial axes, or one integer per axis.

    >>> x, w = torch.tensor([[[1, 2, 3]]], dtype=torch.int8), torch.tensor([[[1, -1]]], dtype=torch.int8)
    >>> conv_int8(x, torch.ones(1, 1, 1), w, torch.ones(1, 1, 1), stride=1, padding=0, dilation=1).tolist()
    [[[-1.0, -1.0]]]
    """
    rest = checked_geometry("conv_int8", x.dim() - 2, (stride, padding, dilation, groups))
    return _conv_operator(x, x_scale, w, w_scale, *rest)


def conv_int8_grad_input(
    g: Tensor,
    g_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    input_size: Sequence[int],
    stride: Axes,
    padding: Axes,
    dilation: Axes,
    groups: int = 1,
) -> Tensor:
    """Returns grad_input = (g ⋆ᵀ w) · (g_scale · w_scale)."""
    op = "conv_int8_grad_input"
    rest = checked_geometry(op, w.dim() - 2, (stride, padding, dilation, groups))
    return _grad_input_operator(g, g_scale, w, w_scale, sizes(op, "input_size", input_size), *rest)


def conv_int8_grad_weight(
    g: Tensor,
    g_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight_size: Sequence[int],
    stride: Axes,
    padding: Axes,
    dilation: Axes,
    groups: int = 1,
) -> Tensor:
    """Returns grad_weight = (g ⋆ x) · (g_scale · x_scale). The sum over N, OH, OW is exact for any number of terms.

    g and x may be packed by 16 images: (N / 16, ..., C, 16), as GPUs read them (contract/packing.py).
    """
    op = "conv_int8_grad_weight"
    size = sizes(op, "weight_size", weight_size)
    rest = checked_geometry(op, min(x.dim(), len(size)) - 2, (stride, padding, dilation, groups))
    return _grad_weight_operator(g, g_scale, x, x_scale, size, *rest)


def matmul_int8(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """Returns (a @ b) · (a_scale · b_scale), exact. Scales may vary along the rows of a and the columns of b.

    >>> a, b = torch.tensor([[1, 2]], dtype=torch.int8), torch.tensor([[3], [4]], dtype=torch.int8)
    >>> matmul_int8(a, torch.tensor([[0.5]]), b, torch.tensor([[2.0]])).tolist()
    [[11.0]]
    """
    return _matmul_operator(a, a_scale, b, b_scale)


def explain(
    product: str,
    x_size: Sequence[int],
    w_size: Sequence[int],
    out_size: Sequence[int],
    geometry: Geometry,
    device: torch.device | str = "cpu",
) -> str:
    """Returns which algorithm runs a product ("output", "grad_input" or "grad_weight") on a device, and why.

    On the CPU it is that of the current path.
    """
    path, device = paths.number(), torch.device(device)
    if device.type == "cpu" and path is not None:
        return cpu_products.explain(path, product, x_size, w_size, out_size, geometry)
    own = getattr(backend_on(device), "explain", None) if device.type != "cpu" else None
    if own is None:
        return "the reference path runs plain PyTorch"
    return str(own(product, x_size, w_size, out_size, geometry, device))
