# SPDX-License-Identifier: Apache-2.0
"""Defines the integer products in plain PyTorch, on any device.

Legend: N C H W input, K C R S weight, N K OH OW output; any number of spatial axes.

A float convolution of tensors with integer values is exact as long as all partial sums are exact integers. In float64 they
always are (up to 2^53). In float32 they are for sums of up to 1040 products; this is twice as fast and uses the direct kernels
of oneDNN. Longer sums are split into slices of that length, which are added in float64. NNPACK must be disabled, because its
Winograd transform rounds. Other devices and processors, where we cannot be sure, use float64 and round the result.

Operands are copied to contiguous tensors first: PyTorch's grouped convolution of a channels_last input gives wrong values if an
axis of size 1 of the weight has an unusual stride. A float sum of one product may be -0.0 (0 · -3), which is not an integer, so
+0.0 is added to every sum.
"""

from __future__ import annotations

import math
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from byteback.ops.contract import layout
from byteback.ops.contract.limits import MAX_FLOAT32_DEPTH
from byteback.ops.contract.scale_rule import combine_scales
from byteback.ops.types import Geometry, ProductCall

_CONV = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_X86 = platform.machine().lower() in {"x86_64", "amd64"}
# The NNPACK flag is global to the process: two threads must not change it at the same time.
_nnpack_lock = threading.Lock()


@contextmanager
def _direct_sums(device: torch.device) -> Iterator[None]:
    # Autocast would round the result to bfloat16.
    with _nnpack_lock, torch.backends.nnpack.flags(enabled=False), torch.autocast(device.type, enabled=False):
        yield


def _slices(total: int, depth_each: int, device: torch.device, splittable: bool) -> list[slice] | None:
    """Returns slices of the summed axis whose sums are exact in float32, or None to compute the whole sum in float64."""
    each = MAX_FLOAT32_DEPTH // max(depth_each, 1)
    if device.type != "cpu" or not _X86 or each == 0 or (each < total and not splittable):
        return None
    return [slice(start, start + each) for start in range(0, max(total, 1), each)]


def _exact(parts: list[slice] | None, device: torch.device, product: Callable[[slice, torch.dtype], Tensor]) -> Tensor:
    """Returns the sum of `product` over all parts, which has integer values."""
    with torch.no_grad(), _direct_sums(device):
        if parts is None:
            return product(slice(None), torch.float64).round() + 0.0
        acc = product(parts[0], torch.float32)
        for part in parts[1:]:
            acc = acc.double() + product(part, torch.float32)
        return acc + 0.0


def _canonical(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts integers to floats in a new contiguous tensor, with the default strides also along axes of size 1."""
    return values.to(dtype, memory_format=torch.contiguous_format, copy=True)


def product_plan(call: ProductCall, a: Tensor, b: Tensor) -> None:
    """Does nothing: this backend has no plans."""


@torch.no_grad()
def product(call: ProductCall, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """Computes one of the three products of a convolution. a and b are the operands as in `ProductCall`."""
    if 0 in a.shape or 0 in b.shape or 0 in call.size:
        return layout.empty_like_product(list(call.size), a, b).zero_()
    acc = _SUMS[call.kind](call, a, b)
    factor = combine_scales(call.kind, a_scale, b_scale, call.groups, call.channels)
    return layout.empty_like_product(list(acc.shape), a, b).copy_(acc.to(torch.float32) * factor)


def _output(call: ProductCall, x: Tensor, w: Tensor) -> Tensor:
    """output[n,k] = Σ_c x[n,c] ⋆ w[k,c]."""
    conv, (stride, padding, dilation, groups) = _CONV[x.dim()], call.geometry
    parts = _slices(w.shape[1], math.prod(w.shape[2:]), x.device, groups == 1)
    whole = parts is None or len(parts) == 1

    def product(part: slice, dtype: torch.dtype) -> Tensor:
        a, b = (x, w) if whole else (x[:, part], w[:, part])
        return conv(_canonical(a, dtype), _canonical(b, dtype), None, stride, padding, dilation, groups)

    return _exact(parts, x.device, product)


def _backward(operands: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, geometry: Geometry, which: int) -> Tensor:
    """Returns the gradient of the input (which = 0) or the weight (1) by aten, from (grad_output, input, weight)."""
    g, x, w = (_canonical(operand, dtype) for operand in operands)
    stride, padding, dilation, groups = geometry
    mask = [which == 0, which == 1, False]
    zeros = [0] * len(stride)
    return torch.ops.aten.convolution_backward(g, x, w, None, stride, padding, dilation, False, zeros, groups, mask)[which]


def _shape_only(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns a placeholder for an operand of which aten only uses the shape."""
    return torch.zeros(1, dtype=torch.int8, device=like.device).expand(shape)


def _grad_input(call: ProductCall, g: Tensor, w: Tensor) -> Tensor:
    """grad_input[n,c] = Σ_k g[n,k] ⋆ᵀ w[k,c]."""
    x = _shape_only(g, call.size)
    parts = _slices(w.shape[0] // call.groups, math.prod(w.shape[2:]), g.device, call.groups == 1)
    whole = parts is None or len(parts) == 1

    def product(part: slice, dtype: torch.dtype) -> Tensor:
        return _backward((g, x, w) if whole else (g[:, part], x, w[part]), dtype, call.geometry, 0)

    return _exact(parts, g.device, product)


def _grad_weight(call: ProductCall, g: Tensor, x: Tensor) -> Tensor:
    """grad_weight[k,c] = Σ_n g[n,k] ⋆ x[n,c]."""
    w = _shape_only(g, call.size)
    parts = _slices(x.shape[0], math.prod(g.shape[2:]), g.device, True)
    return _exact(parts, g.device, lambda part, dtype: _backward((g[part], x[part], w), dtype, call.geometry, 1))


_SUMS = {"output": _output, "grad_input": _grad_input, "grad_weight": _grad_weight}


@torch.no_grad()
def matmul_int8(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """a (M, K) @ b (K, N), summed over K."""
    parts = _slices(a.shape[1], 1, a.device, True)
    acc = _exact(parts, a.device, lambda part, dtype: _canonical(a[:, part], dtype) @ _canonical(b[part], dtype))
    return acc.to(torch.float32) * (a_scale * b_scale)
