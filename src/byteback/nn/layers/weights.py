# SPDX-License-Identifier: Apache-2.0
"""The int8 weight that a frozen layer stores. All other layers quantize their weight in every forward pass.

Autograd does not count every write to a weight: not those through `weight.data`, through numpy or by a fused optimizer. Only a
check of every byte detects them all, and a good hash takes about half of the time of quantizing or more (ResNet-18: 3.7 of
8.3 ms, ResNet-50: 15.8 of 16.4 ms). So a prediction quantizes its weights by default, which is always correct.

A frozen layer (byteback.freeze) stores what is the same in every prediction: its int8 weight, and the coefficients of the norm
after it. It relies on the user not to change them. A change that autograd counted raises an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from byteback import ops
from byteback.nn import quantizing
from byteback.nn.fused.norm import given_coefficients
from byteback.quantize import QTensor

if TYPE_CHECKING:
    from byteback.nn.layers.layer import Int8Layer

_CALLS = 256  # the most calls of one layer, with images of other sizes

_NORMS = 16  # the most norms of one layer: it may be called in several places, with another norm after each

Mark = tuple[tuple[int, int], ...]
"""Address and version of tensors. It changes with the tensor, and with every write that autograd counts."""


class _Weight(NamedTuple):
    mark: Mark
    alive: Tensor  # keeps the memory of the mark allocated, so that no other tensor gets its address
    q: QTensor


class _Coefficients(NamedTuple):
    alive: list[Tensor]
    made: tuple[Tensor, Tensor]


class Calls(dict[Any, Any]):
    """What fused blocks know of the calls of one layer (nn/fused/prediction.py)."""

    def keep(self, key: Any, known: Any) -> None:
        if len(self) >= _CALLS:
            self.clear()
        self[key] = known


class Frozen:
    """The int8 weight and norm coefficients of one frozen layer. A copy of the layer is frozen too and stores its own."""

    def __init__(self) -> None:
        self._weight: _Weight | None = None
        self._norms: dict[tuple[Mark, float], _Coefficients] = {}
        self._clips: dict[tuple[int, bool], Tensor | None] = {}
        self.calls = Calls()

    def __reduce__(self) -> tuple[type[Frozen], tuple[()]]:
        return Frozen, ()

    def weight(self, layer: Int8Layer, weight: Tensor) -> QTensor:
        """Returns the int8 weight, which is quantized in the first call."""
        if layer._parameters.get("weight") is not weight:  # computed by a parametrization or a hook in each call
            return quantizing.fresh_weight(layer, weight)
        mark, kept = mark_of([weight]), self._weight
        if kept is None:
            with torch.inference_mode(False):  # an inference tensor could not be saved for a gradient of the input
                kept = self._weight = _Weight(mark, weight.detach(), quantizing.fresh_weight(layer, weight))
        elif kept.mark != mark:
            raise RuntimeError(
                f"{layer.int8_name}: the weight was changed or replaced while the layer is frozen, so its stored int8 weight "
                "is outdated. Call byteback.freeze(model) again to store the new weight, or byteback.unfreeze(model) before "
                "you change weights."
            )
        return kept.q

    def coefficients(self, norm: ops.BatchNorm | None, bias: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns given_coefficients(norm, bias, weight), computed once for each norm."""
        own = () if norm is None else (norm.gamma, norm.beta, *(norm.running or ()))
        given = [vector for vector in (bias, *own) if vector is not None]
        key = mark_of(given), -1.0 if norm is None else norm.eps
        kept = self._norms.get(key)
        if kept is None:
            if len(self._norms) == _NORMS:
                self._norms.clear()
            alive = [vector.detach() for vector in given]
            kept = self._norms[key] = _Coefficients(alive, given_coefficients(norm, bias, weight))
        return kept.made

    def tracked_clip(self, layer: Int8Layer, slot: int, counting: bool) -> Tensor | None:
        """Returns the clip of the input that training has tracked, read once for each call slot."""
        if (slot, counting) not in self._clips:
            with torch.inference_mode(False):
                self._clips[slot, counting] = layer.quantizers.input.tracked_clip(slot, counting)
        return self._clips[slot, counting]


def norm_as_given(layer: Int8Layer, norm: ops.BatchNorm | None, bias: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the coefficients of a norm in a prediction. A frozen layer stores them."""
    if layer.int8_frozen is None:
        return given_coefficients(norm, bias, weight)
    return layer.int8_frozen.coefficients(norm, bias, weight)


def own_parameter(layer: Any, name: str) -> Any:
    """Returns getattr(layer, name). Where it is a parameter, without the slow search of nn.Module."""
    try:
        return layer._parameters[name]
    except KeyError:
        return getattr(layer, name)  # computed by a parametrization


def refuse_training(layer: Any, what: str) -> None:
    """Raises an error if the layer is frozen. `what` says what would have trained it."""
    if is_frozen(layer):
        raise RuntimeError(
            f"{layer.int8_name}: {what}, but the layer is frozen for predictions (byteback.freeze), so it would still use its "
            "stored int8 weight. Call byteback.unfreeze(model) before you train it, or model.eval() to predict."
        )


def refuse_loading(layer: Any) -> None:
    """Raises an error if the layer is frozen. Called before a weight is loaded."""
    if is_frozen(layer):
        raise RuntimeError(
            f"{layer.int8_name}: cannot load weights into a layer that is frozen for predictions (byteback.freeze): it would "
            "still use its stored int8 weight. Call byteback.unfreeze(model), load the weights, and freeze it again."
        )


def watch_loading(model: nn.Module) -> None:
    """Adds a hook to a frozen model that raises an error before any part of a checkpoint is loaded.

    Without it, float layers could already have new weights when a frozen layer raises the error.
    """
    unwatch_loading(model)
    model._register_load_state_dict_pre_hook(_before_loading, with_module=True)


def unwatch_loading(module: nn.Module) -> None:
    """Removes the hook of `watch_loading` from a module, if it has it."""
    hooks = module._load_state_dict_pre_hooks
    for handle in [handle for handle, hook in hooks.items() if getattr(hook, "hook", None) is _before_loading]:
        del hooks[handle]


def _before_loading(model: nn.Module, *_: Any) -> None:
    for module in model.modules():
        refuse_loading(module)


def is_frozen(module: Any) -> bool:
    """Whether a module is an int8 layer that was frozen by byteback.freeze."""
    return isinstance(module.__dict__.get("int8_frozen"), Frozen)


def mark_of(tensors: list[Tensor]) -> Mark:
    """Returns addresses and versions of tensors."""
    try:
        return tuple([(tensor.data_ptr(), tensor._version) for tensor in tensors])
    except RuntimeError:  # an inference tensor does not count its writes
        return tuple([(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors])
