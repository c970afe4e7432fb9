# SPDX-License-Identifier: Apache-2.0
"""The int8 copy of a layer's weight: made anew for every training step, kept while only predictions are made.

A prediction of one image spends more time on quantizing the weights than on its products. A copy is true as long as the
weight is the one it was made of: the same memory, no write that autograd has counted, and, because `weight.data` may be written
to uncounted, the same bits in 64 places. A training step drops it, and so do copies and checkpoints of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from byteback.ops.fingerprint import fingerprint
from byteback.quantize import QTensor, quantize_fresh

if TYPE_CHECKING:
    from byteback.nn.layer import Int8Layer


class KeptWeight(NamedTuple):
    """An int8 weight and what its float original looked like."""

    mark: tuple[int, int, int]  # version, address, fingerprint
    q: QTensor


def weight_as_int8(layer: Int8Layer, weight: Tensor, predicts: bool) -> QTensor:
    """The weight as int8; `predicts` says that no gradient will be asked for."""
    mark = _mark(weight) if predicts and not layer.training and not torch.compiler.is_compiling() else None
    kept = layer.int8_kept
    if mark is not None and kept is not None and kept.mark == mark:
        return kept.q
    q = quantize_fresh(weight, layer.quantizers.handles["weight"], layer.quantizers.iteration)
    if not torch.compiler.is_compiling():
        layer.int8_kept = None if mark is None else KeptWeight(mark, q)
    return q


def _mark(weight: Tensor) -> tuple[int, int, int] | None:
    bits = fingerprint(weight)
    return None if bits is None else (0 if weight.is_inference() else weight._version, weight.data_ptr(), bits)
