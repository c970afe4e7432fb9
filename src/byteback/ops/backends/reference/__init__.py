# SPDX-License-Identifier: Apache-2.0
"""The reference backend: the definition of every operator in plain PyTorch, on any device. Tests compare with it.

It also lists the functions of a backend. They run without autograd, because integers have no derivative.
"""

from byteback.ops.backends.reference.block import (
    conv_normalize,
    conv_normalize_batch,
    normalize,
    normalize_batch,
    normalize_peak,
    pack_norm,
)
from byteback.ops.backends.reference.block_grad import (
    add_waiting,
    normalize_grad,
    normalize_grad_batch,
    normalize_grad_quantize,
    normalize_grad_quantize_by_ratio,
    normalize_grad_quantize_pair,
    normalize_grad_sums,
    normalize_grad_tails,
)
from byteback.ops.backends.reference.magnitude import gradient_pair, magnitude_clips
from byteback.ops.backends.reference.norm import gradient_sums, norm_coefficients, norm_folded, norm_gradient, norm_invstd
from byteback.ops.backends.reference.pooling import has_max_pool, max_pool, max_pool_grad, spread_pixels, take_pixels
from byteback.ops.backends.reference.products import matmul_int8, product, product_plan
from byteback.ops.backends.reference.quantize import noise_key, quantize, quantize_max, quantize_pair, quantize_plan
from byteback.ops.backends.reference.statistics import (
    absmax,
    channel_cosine_terms,
    channel_stats,
    cosine_slope_terms,
    cosine_terms,
    dot_terms,
    moments,
    tail_count,
    tail_count_pair,
)

__all__ = [
    "add_waiting",
    "absmax",
    "channel_cosine_terms",
    "channel_stats",
    "conv_normalize",
    "conv_normalize_batch",
    "cosine_slope_terms",
    "cosine_terms",
    "dot_terms",
    "gradient_pair",
    "gradient_sums",
    "has_max_pool",
    "magnitude_clips",
    "matmul_int8",
    "max_pool",
    "max_pool_grad",
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
    "product",
    "product_plan",
    "quantize",
    "quantize_max",
    "quantize_pair",
    "quantize_plan",
    "spread_pixels",
    "tail_count",
    "tail_count_pair",
    "take_pixels",
]

path = None
"""The number of the native path; None, because this backend has none."""

steps = "reference.quantizer"
"""The module with the steps of a quantizer (ops/quantizer.py). It is imported late because it uses operators."""
