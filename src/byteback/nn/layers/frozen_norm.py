# SPDX-License-Identifier: Apache-2.0
"""The frozen norm of detectors (torchvision's FrozenBatchNorm2d) as part of a block.

Its forward is a multiply and an add, which a LazyConv does not recognize as a norm. When the module becomes part of a block,
its class is replaced by a subclass. If the input is a LazyConv, the subclass calls F.batch_norm with the four buffers, else the
original forward. A frozen norm is recognized by its class name, its buffers and its results, because torchvision may not be
installed and other projects have their own copy of the class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from byteback.nn.fused.lazy import LazyConv
from byteback.nn.layers.block_module import BlockModule, bind_module, float_class_of

_NAME = "FrozenBatchNorm2d"
_BUFFERS = ("weight", "bias", "running_mean", "running_var")


def has_frozen_name(module: nn.Module) -> bool:
    """Whether the class of a module has the name of the frozen norm. The tracer does not trace into such modules."""
    return float_class_of(module).__name__ == _NAME


def is_frozen_norm(module: nn.Module, channels: int) -> bool:
    """Whether a module is a frozen norm with this number of channels and computes a batch norm with its statistics."""
    if not has_frozen_name(module) or "forward" in module.__dict__ or not isinstance(getattr(module, "eps", None), float):
        return False
    buffers = [module._buffers.get(name) for name in _BUFFERS]
    if any(buffer is None or buffer.shape != (channels,) or buffer.dtype != torch.float32 for buffer in buffers):
        return False
    with torch.no_grad():
        # Two one-pixel images in the range of the buffers: a class of the same name with another formula gives other results.
        x = torch.stack([buffers[2], buffers[2] + buffers[3].abs().sqrt() + 1.0]).reshape(2, channels, 1, 1)  # type: ignore
        expected = _batch_norm(module, x)
        found = float_class_of(module).forward(module, x)
        return expected.is_meta or torch.allclose(found, expected, 1e-3, 1e-4, equal_nan=True)


def _batch_norm(norm: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)


class FusedNorm(BlockModule):
    """Mixin for a frozen norm that is part of a block."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Runs as part of a block if the input is a LazyConv, otherwise as before."""
        return _batch_norm(self, x) if type(x) is LazyConv else super().forward(x)  # type: ignore[misc]


def bind_frozen(module: nn.Module) -> None:
    """Changes the class of a frozen norm to its FusedNorm subclass, in place. Does nothing for other modules."""
    if has_frozen_name(module):
        bind_module(module, FusedNorm)
