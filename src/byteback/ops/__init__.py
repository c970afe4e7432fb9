# SPDX-License-Identifier: Apache-2.0
"""Operators on tensors: integer products, quantization and statistics. They use no recipe and no module.

A quantized tensor is a `QTensor`: int8 values and a float32 scale, whose shape is the granularity.

The names in `__all__` are public. These are stable between minor versions: quantize, quantize_max, noise_key, absmax, moments,
tail_count, dot_terms, the conv_int8 functions and matmul_int8. They are PyTorch operators (torch.ops.byteback). The functions
of the fused block (normalize*, conv_normalize*, norm_*, *_pair) are made for the layers that call them: their bits are stable,
but their parameters may change between minor versions. The submodules are not public.

    products.py   quantize.py   statistics.py   block.py   block_grad.py   norm.py   pooling.py
                      one file per family: definitions, checks, registration in PyTorch
    contract/         what is the same in every backend: limits, scale rule, layouts, noise, rounding
    activations.py    a table of the activations of a fused block
    backends/         the implementations, and which of them runs an operator on given tensors
    dispatch.py       registration of operators, and direct calls without PyTorch's dispatcher
    quantizer.py, programs.py, magnitude.py    the step of a quantizer, and clips from the distribution of a gradient
"""

from __future__ import annotations

import warnings
from typing import Any

from byteback.ops.activations import ACTIVATIONS, SMOOTH
from byteback.ops.block import conv_normalize, conv_normalize_batch, normalize, normalize_batch, normalize_peak, pack_norm
from byteback.ops.block_grad import (
    add_waiting,
    normalize_grad,
    normalize_grad_batch,
    normalize_grad_quantize,
    normalize_grad_quantize_by_ratio,
    normalize_grad_quantize_pair,
    normalize_grad_sums,
    normalize_grad_tails,
)
from byteback.ops.norm import gradient_sums, norm_coefficients, norm_folded, norm_gradient, norm_invstd
from byteback.ops.products import conv_int8, conv_int8_grad_input, conv_int8_grad_weight, matmul_int8
from byteback.ops.quantize import noise_key, quantize, quantize_max, quantize_pair
from byteback.ops.statistics import (
    absmax,
    channel_cosine_terms,
    channel_stats,
    cosine_slope_terms,
    cosine_terms,
    dot_terms,
    moments,
    sum_channels,
    sum_last,
    tail_count,
    tail_count_pair,
)
from byteback.ops.types import (
    BatchNorm,
    GradientParts,
    GradSums,
    Into,
    Normalized,
    NormState,
    QTensor,
    Residual,
)


def __getattr__(name: str) -> Any:
    if name == "Quantized":
        warnings.warn("byteback.ops.Quantized is deprecated: use byteback.QTensor.", DeprecationWarning, stacklevel=2)
        return QTensor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "add_waiting",
    "ACTIVATIONS",
    "BatchNorm",
    "NormState",
    "GradSums",
    "GradientParts",
    "Into",
    "Normalized",
    "QTensor",
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
