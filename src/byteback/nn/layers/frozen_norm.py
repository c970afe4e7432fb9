# SPDX-License-Identifier: Apache-2.0
"""The frozen norm of the detectors (torchvision's FrozenBatchNorm2d) as a stage of a block.

Its own forward multiplies and adds, which a LazyConv does not recognize as a norm. Bound to a block the module gets a twin
class, which calls F.batch_norm with its four buffers on a LazyConv, and its own forward on everything else. It is recognized by
what it holds and by what it computes, as torchvision need not be installed and others have written the same class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from byteback.nn.fused.lazy import LazyConv

_NAME = "FrozenBatchNorm2d"
_BUFFERS = ("weight", "bias", "running_mean", "running_var")


def has_frozen_name(module: nn.Module) -> bool:
    """Whether the module's class says that it is a frozen norm; a graph stops there."""
    return _float_class(module).__name__ == _NAME


def is_frozen_norm(module: nn.Module, channels: int) -> bool:
    """Whether a module is a frozen norm of so many channels, and its forward that of a batch norm with given statistics."""
    if not has_frozen_name(module) or "forward" in module.__dict__ or not isinstance(getattr(module, "eps", None), float):
        return False
    buffers = [module._buffers.get(name) for name in _BUFFERS]
    if any(buffer is None or buffer.shape != (channels,) or buffer.dtype != torch.float32 for buffer in buffers):
        return False
    with torch.no_grad():
        # One pixel of two values in the buffers' own scale: a class of the same name with another formula gives itself away.
        x = torch.stack([buffers[2], buffers[2] + buffers[3].abs().sqrt() + 1.0]).reshape(2, channels, 1, 1)  # type: ignore
        expected = _batch_norm(module, x)
        return expected.is_meta or torch.allclose(_float_class(module).forward(module, x), expected, 1e-3, 1e-4, equal_nan=True)


def _batch_norm(norm: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)


def _float_class(module: nn.Module) -> Any:
    return type(module).float_class if isinstance(module, FusedNorm) else type(module)


class FusedNorm:
    """Mixin for a frozen norm that a block swallows."""

    float_class: type[nn.Module]

    def forward(self: Any, x: Tensor) -> Tensor:
        """The norm: as the next stage of a block, or as it always was."""
        return _batch_norm(self, x) if type(x) is LazyConv else super().forward(x)  # type: ignore[misc]

    def detach(self) -> None:
        """Makes the module what it was."""
        self.__class__ = self.float_class  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The twin is made when it is needed, so pickle cannot find it by name.
        return _blank, (self.float_class,), self.__getstate__()


_twins: dict[type[nn.Module], type[nn.Module]] = {}


def bind_frozen(module: nn.Module) -> None:
    """Turns a frozen norm into its twin, in place; leaves every other module alone."""
    if has_frozen_name(module) and not isinstance(module, FusedNorm):
        module.__class__ = _twin(type(module))


def _twin(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _twins:
        _twins[cls] = type(f"Fused{cls.__name__}", (FusedNorm, cls), {"float_class": cls, "__module__": cls.__module__})
    return _twins[cls]


def _blank(cls: type[nn.Module]) -> nn.Module:
    """An empty instance of the twin, for pickle and copy to fill."""
    twin = _twin(cls)
    return twin.__new__(twin)
