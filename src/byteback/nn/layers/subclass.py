# SPDX-License-Identifier: Apache-2.0
"""The int8 class for a layer's class: Int8Conv2d for nn.Conv2d, and for a user's subclass a new class that derives from both.

A layer of a subclass that only changes the constructor, such as torchvision's Conv3DSimple, keeps its methods and is still an
instance of that class. The int8 class of a subclass is created when it is needed, so pickle cannot find it by name. Its
instances are pickled with the float class instead, from which the int8 class is created again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from byteback.nn.layers.computed import OwnForward, parametrized_class
from byteback.nn.layers.conv import Int8Conv1d, Int8Conv2d, Int8Conv3d
from byteback.nn.layers.layer import OWN_ATTRIBUTES, Int8Layer
from byteback.nn.layers.linear import Int8Linear
from byteback.nn.layers.transposed import Int8ConvTranspose1d, Int8ConvTranspose2d, Int8ConvTranspose3d

INT8_CLASSES: dict[type[nn.Module], type[Int8Layer]] = {
    nn.Conv1d: Int8Conv1d,
    nn.Conv2d: Int8Conv2d,
    nn.Conv3d: Int8Conv3d,
    nn.ConvTranspose1d: Int8ConvTranspose1d,
    nn.ConvTranspose2d: Int8ConvTranspose2d,
    nn.ConvTranspose3d: Int8ConvTranspose3d,
    nn.Linear: Int8Linear,
}


_twins: dict[type[nn.Module], type[nn.Module]] = {}


def int8_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class to which `prepare` changes a layer of class `cls`.

    >>> int8_class(nn.Conv2d).__name__
    'Int8Conv2d'
    >>> Mine = type("Mine", (nn.Conv2d,), {})
    >>> int8_class(Mine).__name__, issubclass(int8_class(Mine), Mine)
    ('Int8Mine', True)
    """
    if cls in INT8_CLASSES:
        return INT8_CLASSES[cls]
    if cls in _twins:
        return _twins[cls]
    base = INT8_CLASSES[torch_class(cls)]
    members = {"float_class": cls, "__reduce_ex__": _reduce, "__module__": cls.__module__}
    bases = (OwnForward, base, cls) if overrides_forward(cls) else (base, cls)
    return _twins.setdefault(cls, type(f"Int8{cls.__name__}", bases, members))


def int8_class_of(layer: nn.Module) -> type[nn.Module]:
    """Returns the class to which `prepare` changes a layer, which may be parametrized."""
    is_parametrized = parametrize.is_parametrized(layer)
    return parametrized_class(type(layer), int8_class) if is_parametrized else int8_class(type(layer))


def torch_class(cls: Any) -> type[nn.Module]:
    """Returns the class of torch.nn that a layer's class derives from."""
    return next(base for base in cls.__mro__ if base in INT8_CLASSES)


def overrides_forward(cls: Any) -> bool:
    """Whether a subclass has its own forward."""
    base: Any = torch_class(cls)
    return any(getattr(cls, name, None) is not getattr(base, name, None) for name in ("forward", "_conv_forward"))


@cache
def own_names(twin: Any) -> tuple[str, ...]:
    """Returns the names that an int8 or fused class adds to its torch class: methods, attributes and what `attach` sets.

    >>> "quantizers" in own_names(Int8Conv2d), "forward" in own_names(Int8Conv2d)
    (True, False)
    """
    base = twin.float_class
    theirs = set(dir(base)).union(*(vars(cls).get("__annotations__", ()) for cls in base.__mro__))
    ours = [cls for cls in twin.__mro__ if cls not in base.__mro__]
    named = {name for cls in ours for name in (*vars(cls), *vars(cls).get("__annotations__", ()))}
    if issubclass(twin, Int8Layer):
        named.update(OWN_ATTRIBUTES)
    return tuple(sorted(name for name in named - theirs if not name.startswith("__")))


def clash(module: nn.Module, twin: Any) -> str | None:
    """Returns a name that the user's layer or its class already uses, but `twin` needs; None if there is none.

    >>> layer = nn.Conv2d(3, 8, 3)
    >>> layer.recipe = "mine"
    >>> clash(layer, Int8Conv2d), clash(nn.Conv2d(3, 8, 3), Int8Conv2d)
    ('recipe', None)
    """
    classes = [vars(cls) for cls in type(module).__mro__ if cls not in twin.float_class.__mro__]
    taken = (module.__dict__, module._parameters, module._buffers, module._modules, *classes)
    return next((name for name in own_names(twin) if any(name in names for names in taken)), None)


def _reduce(layer: Any, protocol: int) -> tuple[Any, ...]:
    return _blank, (type(layer).float_class,), layer.__getstate__()


def _blank(cls: type[nn.Module]) -> nn.Module:
    """Returns an empty instance of the int8 class, which pickle and copy fill."""
    twin = int8_class(cls)
    return twin.__new__(twin)
