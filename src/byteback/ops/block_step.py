# SPDX-License-Identifier: Apache-2.0
"""A fused block's training step as two operations, forward and backward, for backends that run each in one call.

    forward    the weight becomes int8; product, batch norm, activation and int8 in one go; the input's quantizer remembers
    backward   the norm's gradient, the gradient's noise key and clip, its int8 copies, grad_input and grad_weight

`block_site` makes what does not change from step to step, once for each call site. It returns None where the backend has no
such operation, or not for this block. Then nn/fused/block.py calls operators one by one, with the same bits; so it does when a
clip is to be searched, a direction is measured, or a tensor holds NaN or Inf.

A site has these methods. Those that compute return None, and have written nothing, where they cannot run on these tensors.

    forward(x, residual, tensors, momentum)
        x          values, scale, clip and counts of the input
        tensors    weight, gamma, beta, running mean and variance, iteration, then the buffers of the input's quantizer
        returns    y, the weight's values and scale, a, b, mean, invstd, peak, values, scale, counts, output, mask, kept, step,
                   centre; None for each that is not wanted
    places(saved)
        returns    where tensors are, for backward to see whether they came back as they were saved
    backward(g, saved, places, tensors, want_masked, rank, counts_iteration)
        saved      the values and scales of input and weight, two that may be None, the mask, a, b, mean, invstd and the kept
                   input with its step and centre
        tensors    seed, layer, count and iteration, then the buffers of one or two quantizers
        returns    whether the products are there, the iteration, the noise key's two words, and q, r, the gradients of gamma
                   and beta, the masked gradient, Σdx and Σdx², grad_input, grad_weight
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from byteback.ops.quantizer import backend_steps
from byteback.ops.types import Geometry, Wants


class BlockShape(NamedTuple):
    """What a site is made for."""

    x_size: tuple[int, ...]
    weight_size: tuple[int, ...]
    weight_strides: tuple[int, ...]
    size: tuple[int, ...]  # of the result
    geometry: Geometry
    activation: str
    adds: bool  # a float residual is added
    wants: Wants
    eps: float


def block_site(like: Tensor, shape: BlockShape, settings: tuple[Any, ...], for_tensor: bool, slot: int) -> Any:
    """The site of a block on the device of `like`, or None.

    `settings` are those of the input, of the gradient, and of its second copy where there is one. `for_tensor`: grad_input
    uses the first of two copies, else both products use the second.
    """
    return backend_steps(like).block_site(shape, settings, for_tensor, slot)
