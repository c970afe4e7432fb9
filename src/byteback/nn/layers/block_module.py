# SPDX-License-Identifier: Apache-2.0
"""Modules that are part of a block: their class is replaced by a subclass, in place, until `restore`.

The subclass hands itself to the block if its input is a LazyConv. For any other input it is the original class.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class BlockModule:
    """Mixin for a module that is part of a block."""

    float_class: type[nn.Module]

    def detach(self) -> None:
        """Restores the original class of the module."""
        self.__class__ = self.float_class  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The subclass is created when it is needed, so pickle cannot find it by name.
        return _blank, (self.float_class, _mixin(type(self))), self.__getstate__()


_twins: dict[tuple[type[nn.Module], type[BlockModule]], type[nn.Module]] = {}


def bind_module(module: nn.Module, mixin: type[BlockModule]) -> None:
    """Changes the class of a module to its subclass with `mixin`, in place. Does nothing if it has one already."""
    if not isinstance(module, BlockModule):
        module.__class__ = _twin(type(module), mixin)


def float_class_of(module: Any) -> Any:
    """Returns the class that a module had before it became part of a block."""
    return type(module).float_class if isinstance(module, BlockModule) else type(module)


def _twin(cls: type[nn.Module], mixin: type[BlockModule]) -> type[nn.Module]:
    if (cls, mixin) not in _twins:
        _twins[cls, mixin] = type(f"Fused{cls.__name__}", (mixin, cls), {"float_class": cls, "__module__": cls.__module__})
    return _twins[cls, mixin]


def _mixin(twin: Any) -> type[BlockModule]:
    return twin.__bases__[0]


def _blank(cls: type[nn.Module], mixin: type[BlockModule]) -> nn.Module:
    """Returns an empty instance of the subclass, which pickle and copy fill."""
    twin = _twin(cls, mixin)
    return twin.__new__(twin)
