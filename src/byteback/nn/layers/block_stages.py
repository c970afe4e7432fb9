# SPDX-License-Identifier: Apache-2.0
"""Batch norms and activations as parts of a block.

PyTorch's modules call a function, which looks for a class that overrides it, which looks up the stage of the block. In a small
network that takes longer than the kernels. A module that `prepare` has found in a block hands itself to the block directly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from byteback.nn.fused.lazy import LazyConv, record_activation, record_norm
from byteback.nn.layers.block_module import BlockModule, bind_module

_function_mode = torch._C._is_torch_function_mode_enabled  # a mode wants to see the function


class FusedBatchNorm(BlockModule):
    """Mixin for a batch norm that is part of a block."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """Runs as part of a block if the input is a LazyConv, otherwise as before."""
        if type(input) is not LazyConv or _function_mode():
            return super().forward(input)  # type: ignore[misc]
        buffers, parameters = self._buffers, self._parameters
        if not self.track_running_stats or self.momentum is None or "weight" not in parameters or "bias" not in parameters:
            return super().forward(input)  # type: ignore[misc]
        self._check_input_dim(input)
        mean, var, seen = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
        training = self.training
        if training and seen is not None:
            seen.add_(1)
        stage = mean, var, parameters["weight"], parameters["bias"], training or (mean is None and var is None)
        recorded = record_norm(input, *stage, self.momentum, self.eps)
        return F.batch_norm(input, *stage, self.momentum, self.eps) if recorded is None else recorded


class FusedReLU(BlockModule):
    """Mixin for a ReLU that is part of a block."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """Runs as part of a block if the input is a LazyConv, otherwise as before."""
        if type(input) is LazyConv and not _function_mode():
            recorded = record_activation(input, "relu", self.inplace)
            if recorded is not None:
                return recorded
        return super().forward(input)  # type: ignore[misc]


_MIXINS: dict[type[nn.Module], type[BlockModule]] = {
    nn.BatchNorm1d: FusedBatchNorm,
    nn.BatchNorm2d: FusedBatchNorm,
    nn.BatchNorm3d: FusedBatchNorm,
    nn.ReLU: FusedReLU,
}


def bind_stage(module: nn.Module) -> None:
    """Changes the class of a batch norm or a ReLU to its subclass, in place. Does nothing for other modules."""
    mixin = _MIXINS.get(type(module))
    if mixin is not None:
        bind_module(module, mixin)
