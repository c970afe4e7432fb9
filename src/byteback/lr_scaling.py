# SPDX-License-Identifier: Apache-2.0
"""scale_learning_rates: a per-layer learning-rate factor, as a pair of hooks around the optimizer's step.

A scaled gradient is not a scaled learning rate: under momentum, weight decay or Adam the two differ. So the step is taken
as it is, and then shortened:

    before the step   keep w0 = w
    after the step    w = w0 + φ · (w - w0), nothing where φ is 1

Schedulers, parameter groups, foreach and fused variants and gradient accumulation never notice. The same hooks count
iterations, and drop the gradients of a step that met NaN or Inf where the recipe says on_nonfinite="skip".
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from byteback.convert import int8_layers
from byteback.nn import Int8Layer
from byteback.nn.undo import Watch, drop_step, end_step
from byteback.nn.weights import refuse_training


class LearningRateScaling:
    """The installed hooks. `factors()` tells what they do now, `skipped` how many steps were dropped."""

    def __init__(self, optimizer: Optimizer, layers: dict[str, Int8Layer], model: nn.Module) -> None:
        self.layers = layers
        self.model = model
        self.skipped = 0
        self._before: list[tuple[list[Int8Layer], Tensor, float | None]] = []
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._pre_step),
            optimizer.register_step_post_hook(self._post_step),
            Watch(model),
        ]
        for layer in layers.values():
            layer.hooked, layer.scaling = True, self

    def factors(self) -> dict[str, float]:
        """The learning-rate factor of every layer."""
        return {name: layer.learning_rate_factor() for name, layer in self.layers.items()}

    def remove(self) -> None:
        """Takes the hooks off the optimizer."""
        for handle in self._handles:
            handle.remove()
        for layer in self.layers.values():
            layer.hooked, layer.scaling = False, None
        self.layers = {}

    def drop(self, layer: Int8Layer) -> None:
        """Lets go of one layer, which turns float; with the last one the hooks go too."""
        self.layers = {name: other for name, other in self.layers.items() if other is not layer}
        layer.hooked, layer.scaling = False, None
        if not self.layers:
            self.remove()

    def _pre_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        for layer in self.layers.values():
            if layer.weight.grad is not None:
                refuse_training(layer, "the optimizer takes a step")
        closure = kwargs.get("closure") or next(iter(args[1:]), None)  # args[0] is the optimizer itself
        if closure is None:
            self._skip_if_nonfinite(optimizer)
        self._before = []
        for owners in self._by_weight():
            weight = owners[0].weight
            # With a closure the gradients, and so the factors, come only during the step.
            factor = None if closure is not None else 1.0 if weight.grad is None else _factor(owners)
            if factor != 1.0:
                self._before.append((owners, weight.detach().clone(), factor))
        if closure is None:
            return None

        def guarded() -> Any:
            loss = closure()
            self._skip_if_nonfinite(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": guarded}
        return (args[0], guarded, *args[2:]), kwargs

    @torch.no_grad()
    def _post_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        weights, before, factors = [], [], []
        for owners, weight, known in self._before:
            factor = _factor(owners) if known is None else known
            if factor != 1.0:
                weights.append(owners[0].weight)
                before.append(weight)
                factors.append(factor)
        self._before = []
        if weights:
            torch._foreach_sub_(weights, before)
            torch._foreach_mul_(weights, factors)
            torch._foreach_add_(weights, before)
        if self.layers:
            torch._foreach_add_([layer.quantizers.iteration for layer in self.layers.values()], 1)
        end_step(self.model)

    def _by_weight(self) -> list[list[Int8Layer]]:
        """The layers, those that share a weight together: its step is shortened once."""
        owners: dict[int, list[Int8Layer]] = {}
        for layer in self.layers.values():
            owners.setdefault(id(layer.weight), []).append(layer)
        return list(owners.values())

    # ---- on_nonfinite="skip" ----

    def _skip_if_nonfinite(self, optimizer: Optimizer) -> None:
        skipping = [layer for layer in _int8_modules(self.model) if layer.recipe.on_nonfinite == "skip"]
        if not skipping:
            return
        met = False
        for layer in skipping:
            count = int(layer.quantizers.nonfinite)
            met = met or count > layer.quantizers.nonfinite_seen
            layer.quantizers.nonfinite_seen = count
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # All ranks step or none: replicas that disagree would drift apart.
            flag = torch.tensor(int(met), device=skipping[0].weight.device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            met = bool(flag)
        if met:
            self._drop_gradients(optimizer)

    def _drop_gradients(self, optimizer: Optimizer) -> None:
        # Also those of other optimizers of this model: a step is dropped whole.
        own = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for parameter in (*self.model.parameters(), *own):
            parameter.grad = None
        drop_step(self.model)
        self.skipped += 1
        warnings.warn(
            f"byteback: NaN or Inf met while quantizing, so this step's gradients were dropped (skipped {self.skipped} so "
            "far). Many of these in a row mean that training has diverged: lower the learning rate.",
            stacklevel=2,
        )


def _int8_modules(model: nn.Module) -> list[Int8Layer]:
    """The int8 layers of a model as it is now; a layer that is there twice may come twice. Cheaper than model.modules()."""
    found, waiting = [], [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, Int8Layer):
            found.append(module)
        elif module._modules:
            waiting += [child for child in module._modules.values() if child is not None]
    return found


def _factor(owners: list[Int8Layer]) -> float:
    return min(layer.learning_rate_factor() for layer in owners)


def scale_learning_rates(optimizer: Optimizer, model: nn.Module) -> LearningRateScaling:
    """Connects an optimizer with a prepared model; call it once, after both exist.

    Needed by recipes with a learning-rate rule and by on_nonfinite="skip"; for the others it only counts iterations.
    """
    inner = _unwrap(optimizer)
    owned = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    every = int8_layers(model, "scale_learning_rates")
    layers = {name: layer for name, layer in every.items() if id(layer.weight) in owned}
    skips = any(layer.recipe.on_nonfinite == "skip" for layer in every.values())
    if not layers and not skips:
        raise ValueError(
            f"scale_learning_rates: {type(inner).__name__} holds none of this model's {len(every)} int8 weights, so it could "
            "scale nothing. Build the optimizer from model.parameters() of this very model."
        )
    taken = next((name for name, layer in layers.items() if layer.hooked), None)
    if taken is not None:
        raise ValueError(
            f"scale_learning_rates: {taken!r} is connected already; a second pair of hooks would scale its steps twice. "
            "Keep the first one, or call .remove() on it."
        )
    return LearningRateScaling(inner, layers, model)


def _unwrap(optimizer: Any) -> Optimizer:
    """The optimizer whose step() really updates the weights, below wrappers such as accelerate's."""
    for _ in range(8):
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "optim", None)
        if inner is None:
            break
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"scale_learning_rates: got a {type(optimizer).__name__}; it needs the torch.optim.Optimizer whose step() updates "
            "the weights. Pass the inner optimizer of your wrapper."
        )
    return optimizer
