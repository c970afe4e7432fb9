# SPDX-License-Identifier: Apache-2.0
"""The backend of device="meta". Results are empty tensors with the shape, dtype and strides of the real ones.

No function reads or writes a value, so the shapes of a whole training step can be traced. The fake implementations of the
operators (torch.compile) use these functions, too. The tensors of block functions are channels last and dense.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from byteback.ops.activations import TABLE
from byteback.ops.contract import layout
from byteback.ops.programs import Averaged
from byteback.ops.types import (
    BatchNorm,
    Before,
    Clips,
    Extremes,
    GradientParts,
    GradSums,
    Into,
    Kept,
    Normalized,
    NormGradient,
    NormState,
    Pair,
    Paired,
    ProductCall,
    QTensor,
    Residual,
    Wants,
    Window,
)

path = None
"""The number of the native path; None, because this backend has none."""

steps = "meta_quantizer"
"""The module with the steps of a quantizer."""

_FLOAT32, _FLOAT64, _INT64, _INT8, _UINT8 = torch.float32, torch.float64, torch.int64, torch.int8, torch.uint8
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def _like(x: Tensor, dtype: torch.dtype = _FLOAT32) -> Tensor:
    """Returns an empty tensor with the sizes and strides of the dense tensor x."""
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device)


def _kept_shape(x: Tensor, axis: int) -> list[int]:
    return [x.shape[dim] if dim == axis else 1 for dim in range(x.dim())]


def _column(x: Tensor, dtype: torch.dtype = _FLOAT32) -> Tensor:
    """Returns an empty tensor with one number per channel, (1, C, 1, ...)."""
    return x.new_empty(_kept_shape(x, 1), dtype=dtype)


def _vector(x: Tensor, dtype: torch.dtype = _FLOAT32) -> Tensor:
    """Returns an empty tensor with one number per channel, (C,)."""
    return x.new_empty(x.shape[1], dtype=dtype)


def _counts(x: Tensor) -> Tensor:
    return x.new_empty(2, dtype=_INT64)


def _quantized(x: Tensor, scale: Tensor) -> QTensor:
    return QTensor(_like(x, _INT8), scale, _counts(x), x.new_empty((), dtype=_FLOAT32))


# ---- products --------------------------------------------------------------------------------------------------------


def product_plan(call: ProductCall, a: Tensor, b: Tensor) -> None:
    """Prepares nothing."""


def product(call: ProductCall, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    return torch.empty_strided(call.size, call.strides, dtype=_FLOAT32, device=a.device)


def matmul_int8(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=_FLOAT32)


# ---- quantize and statistics -----------------------------------------------------------------------------------------


def quantize(x: Tensor, clip: Tensor, key: Tensor | None) -> QTensor:
    return QTensor(torch.empty_like(x, dtype=_INT8), torch.empty_like(clip), _counts(x), x.new_empty(()))


def quantize_plan(x: Tensor, axis: int) -> tuple[()]:
    """Prepares nothing."""
    return ()


def quantize_max(plan: tuple[()], x: Tensor, axis: int, key: Tensor | None) -> Four:
    shape = _kept_shape(x, axis)
    return torch.empty_like(x, dtype=_INT8), x.new_empty(shape), x.new_empty(shape), _counts(x)


def noise_key(seed: Tensor, layer: Tensor, count: Tensor, rank: int) -> Tensor:
    return count.new_empty(2, dtype=_INT64)


def quantize_pair(x: Tensor, clip: Tensor, clip_per_channel: Tensor, key: Tensor | None) -> tuple[QTensor, QTensor]:
    return _quantized(x, x.new_empty((1,) * x.dim(), dtype=_FLOAT32)), _quantized(x, _column(x))


def absmax(x: Tensor, axis: int) -> Tensor:
    return x.new_empty(_kept_shape(x, axis))


def moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _column(x), _column(x, _FLOAT64), _column(x, _FLOAT64)


def tail_count(x: Tensor, threshold: Tensor) -> Tensor:
    return _column(x, _INT64)


def tail_count_pair(x: Tensor, per_channel: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    return _column(x, _INT64), _column(x, _INT64)


def dot_terms(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(3, dtype=_FLOAT64)


def cosine_terms(x: Tensor, clips: Tensor, stochastic: bool) -> Tensor:
    return x.new_empty(clips.shape[0], 3, dtype=_FLOAT64)


def channel_cosine_terms(x: Tensor, clips: Tensor, stochastic: bool) -> Tensor:
    return x.new_empty(clips.shape[0], 3, x.shape[1], dtype=_FLOAT64)


def cosine_slope_terms(x: Tensor, clip: Tensor) -> Tensor:
    return x.new_empty(5, dtype=_FLOAT64)


def channel_stats(x: Tensor) -> Four:
    return _vector(x, _FLOAT64), _vector(x, _FLOAT64), _vector(x), _vector(x)


# ---- the fused block, forward ----------------------------------------------------------------------------------------


def norm_coefficients(stats: Four, count: int, norm: BatchNorm, activation: str) -> NormState:
    wide, vector = stats[0], stats[2]
    return NormState(_like(vector), _like(vector), _like(wide, _FLOAT64), _like(wide, _FLOAT64), vector.new_empty(()))


def norm_folded(
    mean: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return _like(mean), _like(mean)


def norm_invstd(var: Tensor, eps: float) -> Tensor:
    return _like(var, _FLOAT64)


def normalize_peak(x: Tensor, a: Tensor, b: Tensor, residual: Residual, activation: str) -> Tensor:
    return a.new_empty(())


def normalize(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    residual: Residual,
    activation: str,
    clip: Tensor | None,
    want_float: bool,
    want_mask: bool,
    keep: str | None,
    extremes: Extremes | None,
    into: Into | None,
) -> Normalized:
    mask = None
    q = None if clip is None else _quantized(x, x.new_empty((1,) * x.dim(), dtype=_FLOAT32))._replace(peak=None)
    output = _like(x) if want_float else None
    if into is not None:
        q = q if q is None or into.values is None else q._replace(values=into.values)
        output = into.output if want_float else None
    if want_mask and not TABLE[activation].is_smooth:
        mask = x.new_empty((x.shape.numel() // max(x.shape[1], 1), (x.shape[1] + 7) // 8), dtype=_UINT8)
    return Normalized(q, output, mask, None if keep is None else pack_norm(x, keep, extremes))


def pack_norm(x: Tensor, keep: str, extremes: Extremes | None) -> Kept:
    return _like(x, torch.bfloat16) if keep == "bfloat16" else (_like(x, _INT8), _vector(x), _vector(x))


def normalize_batch(x: Tensor, norm: BatchNorm, residual: Residual, activation: str, wants: Wants) -> Normalized:
    a, b, mean, invstd, peak = norm_coefficients(channel_stats(x), 0, norm, activation)
    clip = peak if wants.int8 else None
    made = normalize(x, a, b, residual, activation, clip, wants.float, wants.mask, wants.keep, None, None)
    made = made if made.output is None else made._replace(output=_like(made.output, wants.output))
    is_known = wants.int8 or (residual is None and TABLE[activation].is_monotone)
    return made._replace(norm=NormState(a, b, mean, invstd, peak if is_known else None))


def conv_normalize(
    call: ProductCall,
    operands: Four,
    a: Tensor,
    b: Tensor,
    residual: Residual,
    activation: str,
    clip: Tensor | None,
    want_float: bool,
    into: Into | None,
) -> Normalized:
    y = _output(call, operands[0])
    return normalize(y, a, b, residual, activation, clip, want_float, False, None, None, into)


def conv_normalize_batch(
    call: ProductCall, operands: Four, norm: BatchNorm, residual: Residual, activation: str, wants: Wants
) -> tuple[Tensor, Normalized]:
    y = _like(_output(call, operands[0]), wants.y)
    return y, normalize_batch(y, norm, residual, activation, wants)


def _output(call: ProductCall, x: Tensor) -> Tensor:
    """Returns an empty output of a convolution, channels last."""
    return torch.empty_strided(call.size, layout.last_strides(call.size), dtype=_FLOAT32, device=x.device)


# ---- the fused block, backward ---------------------------------------------------------------------------------------


def norm_gradient(a: Tensor, mean: Tensor, invstd: Tensor, total: Tensor, dot: Tensor, count: int) -> Four:
    return _like(a), _like(a), _like(a), _like(a)


def gradient_sums(
    a: Tensor,
    q: Tensor,
    r: Tensor,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
    total: Tensor,
    dot: Tensor,
    squares: Tensor,
    count: int,
) -> tuple[Tensor, Tensor]:
    return _like(a, _FLOAT64), _like(a, _FLOAT64)


def normalize_grad_sums(
    g: Tensor,
    x: Kept,
    a: Tensor | None,
    b: Tensor | None,
    mask: Tensor | None,
    activation: str,
    want_masked: bool,
    want_squares: bool,
) -> GradSums:
    squares = _vector(g, _FLOAT64) if want_squares else None
    return GradSums(_vector(g, _FLOAT64), _vector(g, _FLOAT64), squares, _masked(g, activation) if want_masked else None)


def _masked(g: Tensor, activation: str) -> Tensor:
    return _like(g, _FLOAT32 if TABLE[activation].is_smooth else g.dtype)


def normalize_grad(parts: GradientParts) -> Tensor:
    return _like(parts.g)


def add_waiting(x: Tensor, g: Tensor, mask: Tensor | None) -> Tensor:
    return _like(x)


def normalize_grad_quantize(parts: GradientParts, clip: Tensor, key: Tensor | None) -> QTensor:
    return _quantized(parts.g, parts.g.new_empty((1,) * parts.g.dim(), dtype=_FLOAT32))


def normalize_grad_batch(
    g: Tensor,
    x: Kept,
    a: Tensor,
    b: Tensor | None,
    mask: Tensor | None,
    activation: str,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
    want_masked: bool,
    want_sums: bool,
) -> NormGradient:
    sums = (_vector(g, _FLOAT64), _vector(g, _FLOAT64)) if want_sums else None
    return NormGradient(_vector(g), _vector(g), _vector(g), _vector(g), _masked(g, activation) if want_masked else None, sums)


def normalize_grad_tails(parts: GradientParts, per_channel: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _column(parts.g), _column(parts.g, _INT64), _column(parts.g, _INT64)


def normalize_grad_quantize_pair(
    parts: GradientParts, clip: Tensor, clip_per_channel: Tensor, key: Tensor | None
) -> tuple[QTensor, QTensor]:
    return quantize_pair(parts.g, clip, clip_per_channel, key)


def normalize_grad_quantize_by_ratio(parts: GradientParts, ratio: float, key: Tensor | None) -> tuple[Tensor, QTensor]:
    return _column(parts.g), _quantized(parts.g, _column(parts.g))


# ---- pools -----------------------------------------------------------------------------------------------------------


def has_max_pool(x: Tensor, window: Window) -> bool:
    """Returns False: PyTorch's own max_pool2d is used."""
    return False


def _image(size: Sequence[int], like: Tensor, dtype: torch.dtype = _FLOAT32) -> Tensor:
    return torch.empty_strided(size, layout.last_strides(size), dtype=dtype, device=like.device)


def max_pool(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    size = *x.shape[:2], *window.counts(x.shape[2:])
    return _image(size, x), _image(size, x, _UINT8)


def max_pool_grad(g: Tensor, taps: Tensor, size: Sequence[int], window: Window) -> Tensor:
    return _image(size, g)


def take_pixels(x: Tensor, stride: Pair) -> Tensor | None:
    """Returns None: PyTorch's own avg_pool2d is used."""
    return None


def spread_pixels(y: Tensor, size: Sequence[int], stride: Pair) -> Tensor | None:
    """Returns None: PyTorch's own avg_pool2d is used."""
    return None


# ---- magnitude-aware clips -------------------------------------------------------------------------------------------


def magnitude_clips(
    rule: Averaged, x: Tensor, peak: Tensor, total: Tensor, squares: Tensor, before_one: Before, before_each: Before
) -> Clips:
    one, gaussian = (x.new_empty(shape, dtype=dtype) for shape, dtype in (((1,) * x.dim(), _FLOAT32), ((), _FLOAT64)))
    return Clips(one, _column(x), gaussian, gaussian)


def gradient_pair(
    rule: Averaged,
    parts: GradientParts,
    sums: tuple[Tensor, Tensor],
    before_one: Before,
    before_each: Before,
    key: Tensor | None,
    want_one: bool,
) -> Paired:
    g = parts.g
    clips = magnitude_clips(rule, g, *sums, sums[0], before_one, before_each)
    one = QTensor(_like(g, _INT8), g.new_empty((1,) * g.dim(), dtype=_FLOAT32)) if want_one else None
    return Paired(clips, one, QTensor(_like(g, _INT8), _column(g)), (0, 0), 0)
