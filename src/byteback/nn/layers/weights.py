# SPDX-License-Identifier: Apache-2.0
"""What a frozen layer keeps, and what it refuses. The int8 weight of any other layer is made anew in every forward pass.

Autograd does not count every write to a weight: not those through `weight.data`, through numpy or by a fused optimizer. Only a
look at every byte would tell, and a good hash of them takes half the time of quantizing them or more (ResNet-18: 3.7 of 8.3 ms,
ResNet-50: 15.8 of 16.4 ms). So an ordinary prediction quantizes its weights, which cannot go wrong.

A frozen layer (byteback.freeze) keeps what is constant from prediction to prediction: its int8 weight, and the coefficients of
the norm after it. It trusts the user not to change them; a change that autograd has counted is an error all the same.
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

_NORMS = 16  # of one layer: it is called in several places, with a norm after each

Mark = tuple[tuple[int, int], ...]
"""Address and version of tensors: another pair for another tensor, and for every write that autograd has counted."""


class _Weight(NamedTuple):
    mark: Mark
    alive: Tensor  # the memory that the mark speaks of: while it lives, no other tensor can get its address
    q: QTensor


class _Coefficients(NamedTuple):
    alive: list[Tensor]
    made: tuple[Tensor, Tensor]


class Frozen:
    """What one frozen layer keeps. A copy is frozen too, and keeps its own."""

    def __init__(self) -> None:
        self._weight: _Weight | None = None
        self._norms: dict[tuple[Mark, float], _Coefficients] = {}

    def __reduce__(self) -> tuple[type[Frozen], tuple[()]]:
        return Frozen, ()

    def weight(self, layer: Int8Layer, weight: Tensor) -> QTensor:
        """The int8 weight, made at the first call."""
        if layer._parameters.get("weight") is not weight:  # computed by a parametrization or a hook, anew for each call
            return quantizing.fresh_weight(layer, weight)
        mark, kept = _mark([weight]), self._weight
        if kept is None:
            with torch.inference_mode(False):  # an inference tensor could not be saved for a gradient of the input
                kept = self._weight = _Weight(mark, weight.detach(), quantizing.fresh_weight(layer, weight))
        elif kept.mark != mark:
            raise RuntimeError(
                f"{layer.int8_name}: its weight was written to or replaced while the layer is frozen, so the int8 copy that it "
                "keeps is that of another weight. Call byteback.freeze(model) again to keep the new one, or "
                "byteback.unfreeze(model) before you change weights."
            )
        return kept.q

    def coefficients(self, norm: ops.BatchNorm | None, bias: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """given_coefficients(norm, bias, weight), computed once for each norm."""
        own = () if norm is None else (norm.gamma, norm.beta, *(norm.running or ()))
        given = [vector for vector in (bias, *own) if vector is not None]
        key = _mark(given), -1.0 if norm is None else norm.eps
        kept = self._norms.get(key)
        if kept is None:
            if len(self._norms) == _NORMS:
                self._norms.clear()
            alive = [vector.detach() for vector in given]
            kept = self._norms[key] = _Coefficients(alive, given_coefficients(norm, bias, weight))
        return kept.made


def norm_as_given(layer: Int8Layer, norm: ops.BatchNorm | None, bias: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The coefficients of a prediction's norm, which a frozen layer keeps."""
    if layer.int8_frozen is None:
        return given_coefficients(norm, bias, weight)
    return layer.int8_frozen.coefficients(norm, bias, weight)


def refuse_training(layer: Any, what: str) -> None:
    """An error if the layer is frozen; `what` says how it was about to be trained."""
    if is_frozen(layer):
        raise RuntimeError(
            f"{layer.int8_name}: {what}, but the layer is frozen for predictions (byteback.freeze), so it would go on with the "
            "int8 weight that it keeps. Call byteback.unfreeze(model) before you train it, or model.eval() to predict."
        )


def refuse_loading(layer: Any) -> None:
    """An error if the layer is frozen and is about to get another weight."""
    if is_frozen(layer):
        raise RuntimeError(
            f"{layer.int8_name}: weights are loaded into a layer that is frozen for predictions (byteback.freeze), which would "
            "go on with the int8 weight that it keeps. Call byteback.unfreeze(model), load, and freeze it again."
        )


def watch_loading(model: nn.Module) -> None:
    """Makes a frozen model refuse a checkpoint before anything of it is loaded.

    Else a float layer would have its new weight by the time the next layer, a frozen one, refuses.
    """
    unwatch_loading(model)
    model._register_load_state_dict_pre_hook(_before_loading, with_module=True)


def unwatch_loading(module: nn.Module) -> None:
    """Takes the hook of `watch_loading` off a module, if it has it."""
    hooks = module._load_state_dict_pre_hooks
    for handle in [handle for handle, hook in hooks.items() if getattr(hook, "hook", None) is _before_loading]:
        del hooks[handle]


def _before_loading(model: nn.Module, *_: Any) -> None:
    for module in model.modules():
        refuse_loading(module)


def is_frozen(module: Any) -> bool:
    """Whether a module is an int8 layer that byteback.freeze has frozen."""
    return isinstance(module.__dict__.get("int8_frozen"), Frozen)


def _mark(tensors: list[Tensor]) -> Mark:
    # An inference tensor does not count its writes.
    return tuple((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)
