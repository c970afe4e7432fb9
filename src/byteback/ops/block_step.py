# SPDX-License-Identifier: Apache-2.0
"""The training step of a fused block as two operations, forward and backward, for backends that run each in one call.

    forward    quantizes the weight; computes product, batch norm, activation and int8; updates the quantizer of the input
    backward   computes the gradient of the norm, noise key and clip, the int8 copies, grad_input and grad_weight

`block_site` creates a site, once for each call site: what does not change from step to step. It returns None if the backend
does not have these operations, or not for this block. Then nn/fused/block.py calls the operators one by one, with the same
bits. It also does so when a clip is searched, a direction is measured, or a tensor contains NaN or Inf.

A site has these methods. forward and backward return None and change nothing if they cannot run on these tensors.

    forward(x, clip, residual, tensors, momentum)
        x          the int8 input, counted, and the clip that it was quantized with
        tensors    weight, gamma, beta, running mean and variance, iteration, then the buffers of the input's quantizer
        returns    y, the weight's values and scale, a, b, mean, invstd, peak, values, scale, counts, output, mask, kept, step,
                   centre; None for each that is not wanted
    places(saved)
        returns    the addresses of tensors, with which backward checks that the saved tensors are the same
    can_add(g, mask)
        returns    whether backward can add a gradient of this layout to grad_input
    backward(g, saved, places, tensors, waiting, rounds, want_masked, rank, counts_iteration)
        g          float32, or bfloat16 from a stream
        saved      the values and scales of input and weight, two that may be None, the mask, a, b, mean, invstd and the saved
                   input of the norm with its step and centre
        tensors    seed, layer, count and iteration, then the buffers of one or two quantizers
        waiting    None, or a gradient and a mask or None; grad_input contains it (ops.add_waiting)
        rounds     grad_input is rounded to bfloat16
        returns    whether the products are computed, the iteration, the two words of the noise key, and q, r, the gradients
                   of gamma and beta, the masked gradient, Σdx and Σdx², grad_input, grad_weight; q and r may be None if
                   the products are computed
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.ops.quantizer import backend_steps
from byteback.ops.types import Geometry, Wants


class BlockShape(NamedTuple):
    """The shapes and options of a site."""

    x_size: tuple[int, ...]
    weight_size: tuple[int, ...]
    weight_strides: tuple[int, ...]
    size: tuple[int, ...]  # of the result
    geometry: Geometry
    activation: str
    residual: torch.dtype | None  # that is added
    wants: Wants
    eps: float


class PredictionShape(NamedTuple):
    """The shapes and options of a block in predictions."""

    x_size: tuple[int, ...]
    weight_size: tuple[int, ...]
    weight_strides: tuple[int, ...]  # of the integers
    size: tuple[int, ...]  # of the result
    geometry: Geometry
    activation: str
    adds: bool  # a residual


def block_prediction(like: Tensor, shape: PredictionShape) -> Any:
    """Returns a plan of `ops.conv_normalize` on the device of `like`, whose checks are done once; None if there is none.

    Its method run(x, w, a, b, residual, clip, want_float) returns the same Normalized, or None if it cannot run on these
    tensors.
    """
    return backend_steps(like).block_prediction(shape)


def block_site(like: Tensor, shape: BlockShape, settings: tuple[Any, ...], for_tensor: bool, slot: int) -> Any:
    """Returns the site of a block on the device of `like`, or None.

    `settings` are those of the input, of the gradient, and of its second copy if there is one. If `for_tensor` is True,
    grad_input uses the first of two copies, else both products use the second.
    """
    return backend_steps(like).block_site(shape, settings, for_tensor, slot)
