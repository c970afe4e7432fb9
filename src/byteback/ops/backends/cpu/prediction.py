# SPDX-License-Identifier: Apache-2.0
"""The prediction of a block: its product, norm, activation and cast to int8 in one native call.

It is `conv_normalize` (block.py) for shapes that stay the same from one prediction to the next: what Python checks and
calculates for them is done once, in `make_prediction`.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from byteback.ops.backends.cpu import allocator, library
from byteback.ops.backends.cpu.addresses import flat, is_flat, known, last
from byteback.ops.backends.cpu.block import forward_pass
from byteback.ops.backends.cpu.products import conv_shape, rows_last
from byteback.ops.block_step import PredictionShape
from byteback.ops.contract.layout import is_last_dense, last_strides
from byteback.ops.types import Normalized, QTensor, Residual

_native: Any = library.native
# Bound once: after a large layer every attribute look-up in torch is a cache miss.
_threads, _tensor_of, _FLOAT32 = torch.get_num_threads, allocator.tensor_of, torch.float32


_Operands = tuple[tuple[Any, ...], tuple[int, int, int, int]]
"""Tensors that are kept in memory, and the addresses of weight, its scale, a and b."""


class Prediction:
    """The plan of a block, for inputs of one shape."""

    def __init__(self, path: int, shape: PredictionShape) -> None:
        self._path, self._channels, size = path, shape.size[1], shape.size
        self._weight_is_last = is_last_dense(shape.weight_size, shape.weight_strides)
        self._x_strides, self._count = last_strides(shape.x_size), math.prod(size)
        self._plan = _native.PredictPlan(
            conv=conv_shape(shape.x_size, shape.weight_size, size, shape.geometry),
            forward=forward_pass(self._count // self._channels, self._channels, shape.activation, has_residual=shape.adds),
            output=(size, last_strides(size)),
        )
        self._refuses = False  # no kernel can do it
        self._kept: _Operands | None = None

    def run(
        self, x: QTensor, w: QTensor, a: Tensor, b: Tensor, residual: Residual, clip: Tensor | None, want_float: bool
    ) -> Normalized | None:
        """Returns conv_normalize of this block; None if the caller must compute it."""
        values, scale, _, _ = x
        if self._refuses or values.stride() != self._x_strides or scale.numel() != 1:
            return None
        if residual is not None and (not isinstance(residual, Tensor) or residual.dtype is not _FLOAT32):
            return None  # int8, or bfloat16
        kept = self._kept or self._operands(w, a, b)
        if kept is None:
            return None
        made = _native.predict_block(
            self._path,
            self._plan,
            known(values),
            known(scale),
            *kept[1],
            last(residual, _FLOAT32, self._count),
            0,
            0 if clip is None else flat(clip, _FLOAT32, 1),
            want_float,
            allocator.limit,
            _threads(),
        )
        if made is None:
            self._refuses = True
            return None
        library.last_kernel, integers, one, counts, floats = made
        q = None if integers is None else QTensor(_tensor_of(integers), _tensor_of(one), _tensor_of(counts))
        return Normalized(q, None if floats is None else _tensor_of(floats))

    def can_read(self, x: QTensor) -> bool:
        """Whether an input that was just quantized has no NaN or Inf, which the quantizer of the input refuses."""
        return x.counts is not None and not x.counts.tolist()[1]

    def bound(self, w: QTensor, a: Tensor, b: Tensor) -> Prediction:
        """Returns this plan for operands that stay the same and are not written to: they are checked once."""
        made = copy.copy(self)
        made._kept = self._operands(w, a, b)
        return made

    def _operands(self, w: QTensor, a: Tensor, b: Tensor) -> _Operands | None:
        if w.scale.numel() != 1 or not (is_flat(a, _FLOAT32, self._channels) and is_flat(b, _FLOAT32, self._channels)):
            return None
        weight = w.values if self._weight_is_last else rows_last(self._path, w.values)
        return (weight, w, a, b), (known(weight), known(w.scale), known(a), known(b))


def make_prediction(path: int, shape: PredictionShape) -> Prediction | None:
    """Returns the plan; None for empty tensors, and for those of more axes than the library creates."""
    if 0 in (*shape.x_size, *shape.size) or len(shape.size) > allocator.MOST_AXES:
        return None
    return Prediction(path, shape)
