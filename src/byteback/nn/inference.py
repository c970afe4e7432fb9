# SPDX-License-Identifier: Apache-2.0
"""Blocks of a prediction: no gradient will be asked for, and the clip of the int8 result is that of who reads it.

So nothing is computed before somebody reads. Then the product, the norm, the residual, the activation and the cast to int8 are
one pass (ops.conv_normalize), and the product itself is never written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback import ops
from byteback.nn.activation import Joins, Source
from byteback.nn.pending import Norm
from byteback.nn.products import ConvProducts
from byteback.nn.residual import channels_last
from byteback.quantize import QTensor


def can_defer(layer: Any, norm: Norm | None, needs_grad: bool) -> bool:
    """Whether a block of this layer can wait for its reader: it is a prediction, by statistics that are given."""
    return not (needs_grad or layer.training or (norm is not None and norm.training)) and layer.runs_int8("output")


class Shown(NamedTuple):
    """What the block's result looks like from outside, and whether floats are expected to be read."""

    size: torch.Size
    strides: tuple[int, ...]
    floats: bool


class Deferred(Source):
    """A block whose product waits for its reader."""

    def __init__(
        self,
        operands: tuple[QTensor, QTensor],
        products: ConvProducts,
        a: Tensor,
        b: Tensor,
        residual: ops.Residual,
        activation: str,
        shown: Shown,
    ) -> None:
        self.operands, self.products = operands, products
        self.a, self.b, self.residual, self.activation = a, b, residual, activation
        self.shape, self.strides, self.floats = shown
        self.device = a.device
        self.peak, self.output, self.quantized, self.joins = None, None, [], Joins()
        self.product: Tensor | None = None

    @property
    def x(self) -> Tensor:  # type: ignore[override]
        """The product after all: where a second clip, or a maximum, is asked for."""
        if self.product is None:
            self.product = channels_last(self.products.output(*self.operands))
        return self.product

    def write(self, clip: Tensor | None, want_float: bool, want_mask: bool = False) -> Tensor | None:
        if clip is not None and self.output is not None:  # the integers are those of the floats
            values, scale, counts, _ = ops.quantize(self.output, clip.reshape((1,) * len(self.shape)))
            self.quantized.append((clip, QTensor(values, scale), counts))
            return None
        if self.product is not None or self.quantized:
            return super().write(clip, want_float, want_mask)
        made = self._made(clip, want_float or self.floats, None)
        if clip is not None:
            assert made.values is not None and made.scale is not None and made.counts is not None
            self.quantized.append((clip, QTensor(made.values, made.scale), made.counts))
        if made.output is not None:
            self.output = self._laid_out(made.output)
        return None

    def write_into(self, clip: Tensor | None, want_float: bool, into: ops.Into) -> ops.Normalized:
        return self._made(clip, want_float, into) if self.product is None else super().write_into(clip, want_float, into)

    def _made(self, clip: Tensor | None, want_float: bool, into: ops.Into | None) -> ops.Normalized:
        (x, x_scale), (w, w_scale) = self.operands
        follows = (self.a, self.b, self.residual, self.activation, clip)
        return ops.conv_normalize(x, x_scale, w, w_scale, tuple(self.products), *follows, want_float=want_float, into=into)
