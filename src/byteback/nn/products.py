# SPDX-License-Identifier: Apache-2.0
"""The three products of a layer, in int8 and in float, for convolutions and for Linear.

    output      = input ⋆ weight
    grad_input  = grad_output ⋆ᵀ weight
    grad_weight = grad_output ⋆ input

The int8 ones take QTensors, the float ones serve what a recipe keeps in float.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from byteback import ops
from byteback.quantize import QTensor


class ConvProducts(NamedTuple):
    """A convolution's geometry and its three products, in one to three dimensions."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def output(self, x: QTensor, w: QTensor) -> Tensor:
        return ops.conv_int8(x.values, x.scale, w.values, w.scale, *self)

    def normalized_output(
        self, x: QTensor, w: QTensor, norm: ops.BatchNorm, residual: ops.Residual, activation: str, **wants: Any
    ) -> tuple[Tensor, ops.NormalizedBatch]:
        """The output, channels last, and its norm by the batch's own statistics."""
        operands = x.values, x.scale, w.values, w.scale
        return ops.conv_normalize_batch(*operands, self, norm, residual, activation, **wants)

    def grad_input(self, g: QTensor, w: QTensor, input_size: list[int]) -> Tensor:
        return ops.conv_int8_grad_input(g.values, g.scale, w.values, w.scale, input_size, *self)

    def grad_weight(self, g: QTensor, x: QTensor, weight_size: list[int]) -> Tensor:
        return ops.conv_int8_grad_weight(g.values, g.scale, x.values, x.scale, weight_size, *self)

    def float_output(self, x: Tensor, w: Tensor) -> Tensor:
        conv = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
        return conv(x, w, None, self.stride, self.padding, self.dilation, self.groups)

    def float_grad_input(self, g: Tensor, w: Tensor, input_size: list[int]) -> Tensor:
        return self._aten(g, g.new_zeros(1).expand(input_size), w, 0)

    def float_grad_weight(self, g: Tensor, x: Tensor, weight_size: list[int]) -> Tensor:
        return self._aten(g, x, g.new_zeros(1).expand(weight_size), 1)

    def _aten(self, g: Tensor, x: Tensor, w: Tensor, which: int) -> Tensor:
        mask = [which == 0, which == 1, False]
        zeros = [0] * len(self.stride)
        return torch.ops.aten.convolution_backward(
            g, x, w, None, self.stride, self.padding, self.dilation, False, zeros, self.groups, mask
        )[which]


class LinearProducts(NamedTuple):
    """Linear's three products: (M, C) input, (K, C) weight, (M, K) output."""

    def output(self, x: QTensor, w: QTensor) -> Tensor:
        return ops.matmul_int8(x.values, x.scale, w.values.t(), w.scale.t())

    def grad_input(self, g: QTensor, w: QTensor, input_size: list[int]) -> Tensor:
        return ops.matmul_int8(g.values, g.scale, w.values, w.scale)

    def grad_weight(self, g: QTensor, x: QTensor, weight_size: list[int]) -> Tensor:
        return ops.matmul_int8(g.values.t(), g.scale.t(), x.values, x.scale)

    def float_output(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ w.t()

    def float_grad_input(self, g: Tensor, w: Tensor, input_size: list[int]) -> Tensor:
        return g @ w

    def float_grad_weight(self, g: Tensor, x: Tensor, weight_size: list[int]) -> Tensor:
        return g.t() @ x


Products = ConvProducts | LinearProducts
