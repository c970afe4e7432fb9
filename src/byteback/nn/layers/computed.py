# SPDX-License-Identifier: Apache-2.0
"""Layers whose weight is computed in each call. Gradients flow through to what it is computed from.

    parametrization   torch.nn.utils.parametrize (weight_norm, spectral_norm, others): `weight` is a property of the class
    hook              the older weight_norm and spectral_norm: a forward pre-hook sets `weight`
    own forward       a subclass of a convolution overrides forward and calls F.conv1d, 2d or 3d once, with a weight that it
                      computes (weight standardization) or an input that it pads (Conv2dSame): that call runs in int8

The weight is computed once in each call: spectral_norm changes its state with every computation in training.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from byteback.nn.autograd import ConvProducts
from byteback.nn.layers.transforms import RECORDED, record

CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)


def stored_weight(layer: nn.Module) -> Tensor | None:
    """Returns the parameter that is the weight, or the first one that it is computed from; None if there is none."""
    return next(iter(weight_parameters(layer)), None)


def weight_parameters(layer: Any) -> list[Any]:
    """Returns the weight, or the parameters that the weight is computed from.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3))
    >>> [tuple(parameter.shape) for parameter in weight_parameters(layer)]
    [(8, 1, 1, 1), (8, 3, 3, 3)]
    """
    weight = layer._parameters.get("weight")
    if weight is not None and not isinstance(layer, OwnForward):
        return [weight]
    return [one for name, one in layer.named_parameters() if name != "bias" and not name.startswith("parametrizations.bias.")]


def is_weight(layer: Any) -> bool:
    """Whether the products take the parameter named "weight" as it is."""
    return layer._parameters.get("weight") is not None and not isinstance(layer, OwnForward)


# ---- parametrizations --------------------------------------------------------------------------------------------------


def parametrized_class(cls: Any, int8_class: Callable[[Any], type[nn.Module]]) -> type[nn.Module]:
    """Returns the int8 class of a parametrized layer: the properties of its class, on top of the int8 class of the one before.

    This is what register_parametrization makes of an int8 layer, so remove_parametrizations leaves an int8 layer behind.
    """
    names = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__", "__doc__")}
    members = {**names, "float_class": cls, "__deepcopy__": _copy}
    base = int8_class(cls.__bases__[0])
    return type(f"Parametrized{base.__name__}", (base,), members)


def _copy(layer: Any, memo: dict[int, Any]) -> Any:
    """Copies a parametrized layer, which cannot be pickled."""
    replica = memo[id(layer)] = layer.__new__(type(layer))
    replica.__dict__ = deepcopy({**layer.__dict__, "hooked": False, "scaling": None, "int8_sites": {}}, memo)
    return replica


def was_parametrized(layer: Any) -> bool:
    """Whether all parametrizations of an int8 layer are those that it had before `prepare`."""
    if not parametrize.is_parametrized(layer):
        return True
    return all(isinstance(vars(layer.float_class).get(name), property) for name in layer.parametrizations)


# ---- subclasses with their own forward ---------------------------------------------------------------------------------


class OwnForward:
    """Mixin for an int8 convolution of a subclass that overrides forward. Its call of F.conv2d runs in int8."""

    float_class: type[nn.Module]
    int8_name: str

    def forward(self: Any, input: Tensor) -> Any:
        """Runs the forward of the float class."""
        if isinstance(input, RECORDED):
            return record(self, input)
        if not self.runs_int8() or input.is_meta:
            return self.float_class.forward(self, input)
        with _Catch(self):
            return self.float_class.forward(self, input)


class _Catch(TorchFunctionMode):
    """Runs the first convolution with the geometry of a layer in int8."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer: Any = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = conv_call(self.layer, *args, **kwargs) if func in CONVOLVE and self.layer is not None else None
        if call is None:
            return func(*args, **kwargs)
        layer, self.layer = self.layer, None
        return layer.convolve(*call)


def conv_call(
    layer: Any,
    input: Any,
    weight: Any,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, ConvProducts] | None:
    """Returns the arguments of `convolve` for a call of F.conv2d; None if it is not the convolution of this layer."""
    axes = len(layer.kernel_size)
    if isinstance(padding, str) or groups != layer.groups or weight.dtype != torch.float32 or input.dim() != axes + 2:
        return None
    if tuple(weight.shape) != (layer.out_channels, layer.in_channels // groups, *layer.kernel_size):
        return None
    pairs = [(one,) * axes if isinstance(one, int) else tuple(one) for one in (stride, padding, dilation)]
    if pairs[0] != tuple(layer.stride) or pairs[2] != tuple(layer.dilation):  # the float table goes by them
        return None
    return input, weight, bias, ConvProducts(*(one * axes if len(one) == 1 else one for one in pairs), groups)  # type: ignore


class _Spy(TorchFunctionMode):
    """Records the results of the convolutions of a forward, and counts those that would run in int8."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.fits = layer, 0
        self.results: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in CONVOLVE:
            self.results.append(result)
            self.fits += conv_call(self.layer, *args, **kwargs) is not None
        return result


def convolutions_of(twin: Any) -> Literal["none", "inside", "last"]:
    """Runs the forward of a layer, or of a copy that may be changed, on a small input, and returns what it does.

    "last": it returns the result of its only call of F.conv2d, "inside": it goes on with the result, "none": anything else.
    """
    weight = stored_weight(twin)
    if weight is None:
        return "none"
    axes = zip(twin.kernel_size, twin.dilation, twin.stride, strict=True)
    x = weight.new_zeros(2, twin.in_channels, *(apart * (reach - 1) + 1 + step for reach, apart, step in axes))
    cls = twin.float_class if isinstance(twin, OwnForward) else type(twin)
    try:
        with torch.no_grad(), _Spy(twin) as spy:
            output = cls.forward(twin, x)
    except Exception:  # of the user's forward
        return "none"
    if spy.fits != 1 or len(spy.results) != 1:
        return "none"
    return "last" if output is spy.results[0] else "inside"
