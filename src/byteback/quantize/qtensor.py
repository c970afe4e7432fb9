# SPDX-License-Identifier: Apache-2.0
"""QTensor: the integers of one tensor for one step, with their scale.

Invariants: values is int8 in [-127, 127]. scale is float32 and positive. It has the same rank, with size 1 along the axes that
share it, so its shape is the granularity. values * scale approximates the original tensor.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class QTensor(NamedTuple):
    """int8 values and their scale.

    >>> import torch
    >>> q = QTensor(torch.tensor([[127, -64]], dtype=torch.int8), torch.tensor([[0.5]]))
    >>> q.dequantize().tolist()
    [[63.5, -32.0]]
    """

    values: Tensor
    scale: Tensor

    def dequantize(self) -> Tensor:
        """Returns values * scale in float32."""
        return self.values.float() * self.scale
