# SPDX-License-Identifier: Apache-2.0
"""FLOOR 0: tensors in, tensors out. Integer products, quantization and statistics; no recipe, no module.

Read `limits.py` (the contract's numbers), `scale_rule.py` (what may be multiplied with what), `reference.py` and
`statistics.py` (what each operator means), `noise.py` (stochastic rounding), `schema*.py` (how PyTorch sees them);
`normalize*.py`, `batch.py`, `batch_grad.py`, `finished.py` and `pairs.py` for the passes of the fused block around a
convolution, which are plain functions, and `coefficients.py`, `magnitude.py` for the small
arithmetic between them.

Tensors of integers come as a pair (values: int8, scale: float32); the granularity is the shape of `scale`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch  # noqa: F401  (for the examples)
from torch import Tensor

from byteback.ops import schema_products, schema_quantize
from byteback.ops.batch import BatchNorm, NormalizedBatch, conv_normalize_batch, normalize_batch
from byteback.ops.batch_grad import normalize_grad_batch
from byteback.ops.coefficients import (
    Coefficients,
    gradient_sums,
    norm_coefficients,
    norm_folded,
    norm_gradient,
    norm_invstd,
)
from byteback.ops.finished import conv_normalize
from byteback.ops.geometry import Axes, geometry, sizes, whole
from byteback.ops.normalize import (
    ACTIVATIONS,
    SMOOTH,
    Into,
    Normalized,
    Residual,
    channel_stats,
    normalize,
    normalize_peak,
    pack_norm,
)
from byteback.ops.normalize_grad import (
    GradientParts,
    GradSums,
    normalize_grad,
    normalize_grad_quantize,
    normalize_grad_sums,
)
from byteback.ops.pairs import (
    Quantized,
    normalize_grad_quantize_by_ratio,
    normalize_grad_quantize_pair,
    normalize_grad_tails,
    quantize_pair,
    tail_count_pair,
)
from byteback.ops.statistics import sum_channels, sum_last

__all__ = [
    "ACTIVATIONS",
    "BatchNorm",
    "Coefficients",
    "GradSums",
    "GradientParts",
    "Into",
    "Normalized",
    "NormalizedBatch",
    "Quantized",
    "Residual",
    "SMOOTH",
    "absmax",
    "channel_cosine_terms",
    "channel_stats",
    "conv_int8",
    "conv_int8_grad_input",
    "conv_int8_grad_weight",
    "conv_normalize",
    "conv_normalize_batch",
    "cosine_slope_terms",
    "cosine_terms",
    "dot_terms",
    "gradient_sums",
    "matmul_int8",
    "moments",
    "noise_key",
    "norm_coefficients",
    "norm_folded",
    "norm_gradient",
    "norm_invstd",
    "normalize",
    "normalize_batch",
    "normalize_grad",
    "normalize_grad_batch",
    "normalize_grad_quantize",
    "normalize_grad_quantize_by_ratio",
    "normalize_grad_quantize_pair",
    "normalize_grad_sums",
    "normalize_grad_tails",
    "normalize_peak",
    "pack_norm",
    "quantize",
    "quantize_max",
    "quantize_pair",
    "sum_channels",
    "sum_last",
    "tail_count",
    "tail_count_pair",
]


def quantize(x: Tensor, clip: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q = round(clamp(x * (127 / clip), ±127)), scale = clip / 127; to nearest, or stochastically with a noise key.

    Returns the int8 values, the scale (shaped as `clip`), the counts (|x| > clip, non-finite) and max|x|.

    >>> x = torch.tensor([[-4.0, 0.1, 2.0]])
    >>> values, scale, counts, peak = quantize(x, torch.tensor([[2.0]]))
    >>> values.tolist(), counts.tolist(), peak.item()
    ([[-127, 6, 127]], [1, 0], 4.0)
    """
    return schema_quantize.quantize(x, clip, key)


def quantize_max(x: Tensor, axis: int = -1, key: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize` with clip = max|x|, over everything (-1) or for each index of `axis`: `absmax` and `quantize` in one call.

    Returns the int8 values, the scale, the clip (both shaped as `absmax` shapes it) and the counts (saturated, non-finite).

    >>> values, scale, clip, counts = quantize_max(torch.tensor([[-4.0, 0.1, 2.0]]))
    >>> values.tolist(), clip.tolist(), counts.tolist()
    ([[-127, 3, 64]], [[4.0]], [0, 0])
    """
    return schema_quantize.quantize_max(x, whole("quantize_max", "axis", axis), key)


def noise_key(seed: Tensor, layer: Tensor, count: Tensor, rank: int = 0) -> Tensor:
    """The key of one gradient's noise: an int64 pair, different for each (seed, rank, layer, count).

    Of the layer and the rank the low 32 bits count, of the seed and the count all 64. Both words of the key are below 2^32;
    where a caller makes a key of other numbers, `quantize` and its kind read the low 32 bits of each.
    """
    return schema_quantize.noise_key(seed, layer, count, whole("noise_key", "rank", rank))


def absmax(x: Tensor, axis: int = -1) -> Tensor:
    """max|x|, over everything (-1) or for each index of `axis`; the other axes become ones. NaN if any element is.

    >>> absmax(torch.tensor([[1.0, -3.0], [2.0, 0.5]]), axis=1).tolist()
    [[2.0, 3.0]]
    """
    return schema_quantize.absmax(x, whole("absmax", "axis", axis))


def moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per channel max|x|, Σx and Σx², each of shape (1, C, 1, ...); the sums are float64 with defined bits.

    >>> [m.flatten().tolist() for m in moments(torch.tensor([[1.0, -3.0], [2.0, 0.5]]))]
    [[2.0, 3.0], [3.0, -2.5], [5.0, 9.25]]
    """
    return schema_quantize.moments(x)


def tail_count(x: Tensor, threshold: Tensor) -> Tensor:
    """Per channel, how many |x| exceed the threshold (one for all, or one per channel)."""
    return schema_quantize.tail_count(x, threshold)


def dot_terms(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """(x·x̂, x̂·x̂, x·x) in float64, x̂ = values · scale: for the cosine between a tensor and its quantized self.

    >>> q = torch.tensor([[6, 8]], dtype=torch.int8)
    >>> dot_terms(torch.tensor([[3.0, 4.0]]), q, torch.tensor([[0.5]])).tolist()
    [25.0, 25.0, 25.0]
    """
    return schema_quantize.dot_terms(x, values, scale)


def cosine_terms(x: Tensor, clips: Tensor, stochastic: bool = False) -> Tensor:
    """One row (x·q, q·q, x·x) for each candidate clip, with q rounded to nearest under that clip.

    With `stochastic` the terms are those expected of stochastic rounding: with y the number before it is rounded and f its
    fractional part, x·q is x·y and q·q is Σ (y² + f (1 - f)).

    >>> x = torch.tensor([[127.0, 31.75]])
    >>> cosine_terms(x, torch.tensor([127.0])).tolist(), cosine_terms(x, torch.tensor([127.0]), stochastic=True).tolist()
    ([[17145.0, 17153.0, 17137.0625]], [[17137.0625, 17137.25, 17137.0625]])
    """
    return schema_quantize.cosine_terms(x, clips, stochastic)


def channel_cosine_terms(x: Tensor, clips: Tensor, stochastic: bool = False) -> Tensor:
    """`cosine_terms` of each channel by itself, for candidates (candidates, C) with a clip for each: (candidates, 3, C).

    >>> x = torch.tensor([[127.0, 2.0]])
    >>> channel_cosine_terms(x, torch.tensor([[127.0, 127.0], [127.0, 2.0]]))[:, 1].tolist()
    [[16129.0, 4.0], [16129.0, 16129.0]]
    """
    return schema_quantize.channel_cosine_terms(x, clips, stochastic)


def cosine_slope_terms(x: Tensor, clip: Tensor) -> Tensor:
    """(x·q, q·q, x·x, x·d, q·d), d being 127 times the derivative of the quantized tensor by its clip."""
    return schema_quantize.cosine_slope_terms(x, clip)


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
    """output = (x ⋆ w) · (x_scale · w_scale): exact int8 convolution in one to three dimensions, float32 result.

    stride, padding and dilation are one integer for all spatial axes, or one for each.

    >>> x, w = torch.tensor([[[1, 2, 3]]], dtype=torch.int8), torch.tensor([[[1, -1]]], dtype=torch.int8)
    >>> conv_int8(x, torch.ones(1, 1, 1), w, torch.ones(1, 1, 1), stride=1, padding=0, dilation=1).tolist()
    [[[-1.0, -1.0]]]
    """
    rest = geometry("conv_int8", x.dim() - 2, (stride, padding, dilation, groups))
    return schema_products.conv_int8(x, x_scale, w, w_scale, *rest)


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
    """grad_input = (g ⋆ᵀ w) · (g_scale · w_scale)."""
    op = "conv_int8_grad_input"
    rest = geometry(op, w.dim() - 2, (stride, padding, dilation, groups))
    return schema_products.conv_int8_grad_input(g, g_scale, w, w_scale, sizes(op, "input_size", input_size), *rest)


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
    """grad_weight = (g ⋆ x) · (g_scale · x_scale), summed exactly over N, OH, OW however deep that is."""
    op = "conv_int8_grad_weight"
    rest = geometry(op, x.dim() - 2, (stride, padding, dilation, groups))
    return schema_products.conv_int8_grad_weight(g, g_scale, x, x_scale, sizes(op, "weight_size", weight_size), *rest)


def matmul_int8(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """(a @ b) · (a_scale · b_scale), exact; scales may vary along a's rows and b's columns.

    >>> a, b = torch.tensor([[1, 2]], dtype=torch.int8), torch.tensor([[3], [4]], dtype=torch.int8)
    >>> matmul_int8(a, torch.tensor([[0.5]]), b, torch.tensor([[2.0]])).tolist()
    [[11.0]]
    """
    return schema_products.matmul_int8(a, a_scale, b, b_scale)
