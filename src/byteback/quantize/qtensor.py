# SPDX-License-Identifier: Apache-2.0
"""QTensor: the integers of one tensor for one step, with their scale.

Invariants: values is int8 in [-127, 127]; scale is float32, positive, of the same rank, with ones along the axes that
share it; the tensor it stands for is about values * scale. Granularity is nothing but the shape of `scale`.
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
        """values * scale, in float32."""
        return self.values.float() * self.scale
