# SPDX-License-Identifier: Apache-2.0
"""The backend of GPUs: Triton kernels for everything in a training step. It never waits for the device.

    products, quantize, statistics, block, block_grad, norm, magnitude, pooling   the functions of a backend
    quantizer.py   the step of a quantizer, in device memory; search.py searches clips
    kernels/       the kernels, by family
    launch.py      how kernels are launched; tiles.py chooses the tiles of products
    self_check.py  the check before a device is trusted

The registry imports this folder when the first tensor of a GPU arrives, because Triton is an optional part.
"""

from byteback.ops.backends.triton.block import (
    conv_normalize,
    conv_normalize_batch,
    normalize,
    normalize_batch,
    normalize_peak,
    pack_norm,
)
from byteback.ops.backends.triton.block_grad import (
    add_waiting,
    normalize_grad,
    normalize_grad_batch,
    normalize_grad_quantize,
    normalize_grad_quantize_by_ratio,
    normalize_grad_quantize_pair,
    normalize_grad_sums,
    normalize_grad_tails,
)
from byteback.ops.backends.triton.magnitude import gradient_pair, magnitude_clips
from byteback.ops.backends.triton.norm import gradient_sums, norm_coefficients, norm_folded, norm_gradient, norm_invstd
from byteback.ops.backends.triton.plan import product_plan
from byteback.ops.backends.triton.pooling import has_max_pool, max_pool, max_pool_grad, spread_pixels, take_pixels
from byteback.ops.backends.triton.products import explain, grad_weight_packed, matmul_int8, product
from byteback.ops.backends.triton.quantize import absmax, noise_key, quantize, quantize_max, quantize_pair, quantize_plan
from byteback.ops.backends.triton.statistics import (
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
    "absmax",
    "add_waiting",
    "channel_cosine_terms",
    "channel_stats",
    "conv_normalize",
    "conv_normalize_batch",
    "cosine_slope_terms",
    "cosine_terms",
    "dot_terms",
    "explain",
    "gradient_pair",
    "grad_weight_packed",
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

steps = "triton.quantizer"
"""The module with the steps of a quantizer."""
