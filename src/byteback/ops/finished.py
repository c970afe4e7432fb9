# SPDX-License-Identifier: Apache-2.0
"""A convolution together with what follows it, for predictions: its product never reaches the memory as floats.

    conv_normalize(x, w, ...) = normalize(conv_int8(x, w, ...), ...)

That is the definition, and the bits are the same. The native kernels hand each piece of the product to an epilogue
(csrc/epilogue.h) while it is in the cache; where no kernel can do that, the two steps follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from byteback.addresses import CPU, flat, known, new
from byteback.ops import layout, native, native_kernels, pool, schema_products
from byteback.ops.geometry import geometry as checked_geometry
from byteback.ops.normalize import Into, Normalized, Residual, normalize
from byteback.ops.normalize_checks import (
    check_activation,
    check_into,
    check_one,
    check_residual,
    check_vector,
    path_for,
    tensors_of,
)
from byteback.ops.normalize_native import place, residual_numbers

_library: Any = native.library


def last_strides(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor (N, C, ...) with its channels last, of any rank.

    >>> last_strides((2, 3, 4, 5)), last_strides((2, 3, 4))
    ((60, 1, 15, 3), (12, 1, 3))
    """
    order = layout.dense_strides([size[0], *size[2:], size[1]], False)
    return order[0], order[-1], *order[1:-1]


def conv_normalize(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    geometry: tuple[Any, ...],
    a: Tensor,
    b: Tensor,
    residual: Residual,
    activation: str,
    clip: Tensor | None,
    *,
    want_float: bool,
    into: Into | None = None,
) -> Normalized:
    """normalize(conv_int8(x, x_scale, w, w_scale, *geometry), a, b, residual, activation, clip) in one pass.

    geometry is stride, padding, dilation and groups; values, scale, output and counts are as in `normalize`.

    >>> x, w, one = torch.tensor([[[[3]]]], dtype=torch.int8), torch.tensor([[[[5]]]], dtype=torch.int8), torch.ones(1, 1, 1, 1)
    >>> flat = ((1, 1), (0, 0), (1, 1), 1)
    >>> made = conv_normalize(x, one, w, one, flat, torch.ones(1), torch.ones(1), None, "relu", None, want_float=True)
    >>> made.output.item()
    16.0
    """
    op = "conv_normalize"
    geometry = checked_geometry(op, x.dim() - 2, geometry)
    path = path_for(op, x, x_scale, w, w_scale, a, b, *tensors_of(residual), clip, *(into or ())[:2])
    if path is not None and w.numel():
        product = schema_products.output_plan(x, x_scale, w, w_scale, *geometry)
        like = torch.empty_strided(product.size, (0,) * len(product.size), dtype=torch.float32, device=CPU)
        a, b = check_vector(op, "a", a, product.channels), check_vector(op, "b", b, product.channels)
        residual, index = check_residual(op, residual, like), check_activation(op, activation)
        check_into(op, into, like, clip, want_float)
        clip = None if clip is None else check_one(op, "clip", clip)
        made = _native(path, product, (x, x_scale, w, w_scale), (a, b), residual, index, clip, want_float, into)
        if made is not None:
            return made
    y = schema_products.conv_int8(x, x_scale, w, w_scale, *geometry)
    return normalize(y, a, b, residual, activation, clip, want_float=want_float, want_mask=False, into=into)


def _native(
    path: int,
    product: native_kernels.Plan,
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    vectors: tuple[Tensor, Tensor],
    residual: Residual,
    activation: int,
    clip: Tensor | None,
    want_float: bool,
    into: Into | None,
) -> Normalized | None:
    x, w, scales, scale_strides, alive = native_kernels.laid_out(path, product, *operands)
    size, strides = product.size, last_strides(product.size)
    values = scale = output = counts = None
    if clip is not None:
        values = pool.empty(size, strides, torch.int8, CPU) if into is None else into.values
        scale, counts = new((1,) * len(size), torch.float32), new(2, torch.int64)
    if want_float:
        output = pool.empty(size, strides, torch.float32, CPU) if into is None else into.output
    (a, b), channels, count = vectors, product.channels, math.prod(size)
    follows = flat(a, torch.float32, channels), flat(b, torch.float32, channels), *residual_numbers(residual, count)
    kernel = _library.conv_normalize(
        path,
        product.shape,
        known(x),
        known(w),
        scales,
        scale_strides,
        follows,
        activation,
        flat(clip, torch.float32, 1),
        place(values, torch.int8, count, into),
        known(scale),
        known(counts),
        place(output, torch.float32, count, into),
        product.channels if into is None else into.pitch,
        torch.get_num_threads(),
    )
    del alive  # the scales, until here
    if not kernel:
        return None
    native.last_kernel = kernel
    return Normalized(values, scale, output, None, counts)
