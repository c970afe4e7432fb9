# SPDX-License-Identifier: Apache-2.0
"""The exact meaning of each integer operator in plain PyTorch: the kernel on any device, the oracle of every test.

Legend: N C H W input, K C R S weight, N K OH OW output; any number of spatial axes.

Integer sums have no rounding, so a float convolution of integer-valued tensors is exact as long as no partial sum leaves
the float's integers. float64 always holds them (2^53). float32 holds sums of up to 1040 products, twice as fast and with
oneDNN's direct kernels; deeper sums are cut into slices of that depth and added in float64. NNPACK must stay out of the
way (its Winograd transform rounds), and so must every backend that we cannot vouch for: those get float64 and a round.

Operands are copied to contiguous tensors first: PyTorch's grouped convolution of a channels_last input gives wrong values
where an axis of size 1 of the weight has an unusual stride. And a float sum of one product may be -0.0 (0 · -3), which no
integer is: every sum gets +0.0 added.
"""

from __future__ import annotations

import math
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from byteback.ops import layout, noise, statistics
from byteback.ops.limits import MAX_FLOAT32_DEPTH, QMAX, ZERO_SCALE
from byteback.ops.rounded_once import divided_by
from byteback.ops.scale_rule import combine_scales

_CONV = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_X86 = platform.machine().lower() in {"x86_64", "amd64"}
Geometry = tuple[list[int], list[int], list[int], int]  # stride, padding, dilation, groups
# The NNPACK switch is global to the process: two threads must not restore it under each other's feet.
_nnpack_lock = threading.Lock()


def quantize(x: Tensor, clip: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """int8 values, their scale, (saturated, non-finite) counts and max|x|; see `byteback.ops.quantize`."""
    live = statistics.is_live(clip)
    safe = torch.where(live, clip, 1.0)
    y = (x * statistics.inverse_scale(safe)).clamp(-QMAX, QMAX)
    y = y.round() if key is None else torch.floor(y + noise.uniform_like(x, key))
    finite = torch.isfinite(x)
    values = torch.empty_like(x, dtype=torch.int8)
    values.copy_(torch.where(live & ~torch.isnan(x), y, 0.0))
    scale = torch.where(live, divided_by(safe, QMAX), ZERO_SCALE)
    saturated = ((x.abs() > clip) & live).sum()
    return values, scale, torch.stack([saturated, (~finite).sum()]), statistics.absmax(x, -1).reshape(())


def quantize_max(x: Tensor, axis: int, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """int8 values, their scale, the clip max|x| and the counts; see `byteback.ops.quantize_max`."""
    clip = statistics.absmax(x, axis)
    values, scale, counts, _ = quantize(x, clip, key)
    return values, scale, clip, counts


def noise_key(seed: Tensor, layer: Tensor, count: Tensor, rank: int) -> Tensor:
    """(k0, k1) as int64; see noise.py."""
    words = noise.key_words(int(seed), rank, int(layer), int(count))
    return torch.tensor(words, dtype=torch.int64, device=count.device)


@contextmanager
def _direct_sums(device: torch.device) -> Iterator[None]:
    # Autocast would round the result to bfloat16.
    with _nnpack_lock, torch.backends.nnpack.flags(enabled=False), torch.autocast(device.type, enabled=False):
        yield


def _slices(total: int, depth_each: int, device: torch.device, splittable: bool) -> list[slice] | None:
    """Slices of the summed axis whose sums are exact in float32, or None where float64 must do it in one go."""
    each = MAX_FLOAT32_DEPTH // max(depth_each, 1)
    if device.type != "cpu" or not _X86 or each == 0 or (each < total and not splittable):
        return None
    return [slice(start, start + each) for start in range(0, max(total, 1), each)]


def _exact(parts: list[slice] | None, device: torch.device, product: Callable[[slice, torch.dtype], Tensor]) -> Tensor:
    """The integer-valued sum of `product` over all parts."""
    with torch.no_grad(), _direct_sums(device):
        if parts is None:
            return product(slice(None), torch.float64).round() + 0.0
        acc = product(parts[0], torch.float32)
        for part in parts[1:]:
            acc = acc.double() + product(part, torch.float32)
        return acc + 0.0


def _canonical(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Integers as floats in a new contiguous tensor, whose strides are those of its shape also along axes of size 1."""
    return values.to(dtype, memory_format=torch.contiguous_format, copy=True)


def _rescale(acc: Tensor, scale: Tensor, *operands: Tensor) -> Tensor:
    """float(acc) * scale, in PyTorch's memory format: the one expression back to float."""
    result = layout.empty_like_product(list(acc.shape), *operands)
    return result.copy_(acc.to(torch.float32) * scale)


def conv_int8(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """output[n,k] = Σ_c x[n,c] ⋆ w[k,c]."""
    conv = _CONV[x.dim()]
    parts = _slices(w.shape[1], math.prod(w.shape[2:]), x.device, groups == 1)
    whole = parts is None or len(parts) == 1

    def product(part: slice, dtype: torch.dtype) -> Tensor:
        a, b = (x, w) if whole else (x[:, part], w[:, part])
        return conv(_canonical(a, dtype), _canonical(b, dtype), None, stride, padding, dilation, groups)

    acc = _exact(parts, x.device, product)
    return _rescale(acc, combine_scales("output", x_scale, w_scale, groups, w.shape[0]), x, w)


def _backward(operands: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, geometry: Geometry, which: int) -> Tensor:
    """aten's gradient for the input (which = 0) or the weight (1), from (grad_output, input, weight)."""
    g, x, w = (_canonical(operand, dtype) for operand in operands)
    stride, padding, dilation, groups = geometry
    mask = [which == 0, which == 1, False]
    zeros = [0] * len(stride)
    return torch.ops.aten.convolution_backward(g, x, w, None, stride, padding, dilation, False, zeros, groups, mask)[which]


def _shape_only(like: Tensor, shape: list[int]) -> Tensor:
    """A stand-in for the operand that aten asks for but only takes the shape of."""
    return torch.zeros(1, dtype=torch.int8, device=like.device).expand(shape)


def conv_int8_grad_input(
    g: Tensor,
    g_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    input_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """grad_input[n,c] = Σ_k g[n,k] ⋆ᵀ w[k,c]."""
    if 0 in input_size or 0 in g.shape:
        return layout.empty_like_product(input_size, g, w).zero_()
    geometry = (stride, padding, dilation, groups)
    x = _shape_only(g, input_size)
    parts = _slices(w.shape[0] // groups, math.prod(w.shape[2:]), g.device, groups == 1)
    whole = parts is None or len(parts) == 1

    def product(part: slice, dtype: torch.dtype) -> Tensor:
        return _backward((g, x, w) if whole else (g[:, part], x, w[part]), dtype, geometry, 0)

    acc = _exact(parts, g.device, product)
    return _rescale(acc, combine_scales("grad_input", g_scale, w_scale, groups, w.shape[0]), g, w)


def conv_int8_grad_weight(
    g: Tensor,
    g_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """grad_weight[k,c] = Σ_n g[n,k] ⋆ x[n,c]."""
    if 0 in x.shape or 0 in g.shape:
        return layout.empty_like_product(weight_size, g, x).zero_()
    geometry = (stride, padding, dilation, groups)
    w = _shape_only(g, weight_size)
    parts = _slices(x.shape[0], math.prod(g.shape[2:]), g.device, True)
    acc = _exact(parts, g.device, lambda part, dtype: _backward((g[part], x[part], w), dtype, geometry, 1))
    return _rescale(acc, combine_scales("grad_weight", g_scale, x_scale, groups, g.shape[1]), g, x)


def matmul_int8(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """a (M, K) @ b (K, N), summed over K."""
    parts = _slices(a.shape[1], 1, a.device, True)
    acc = _exact(parts, a.device, lambda part, dtype: _canonical(a[:, part], dtype) @ _canonical(b[part], dtype))
    return acc.to(torch.float32) * (a_scale * b_scale)
