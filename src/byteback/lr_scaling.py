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


class LearningRateScaling:
    """The installed hooks. `factors()` tells what they do now, `skipped` how many steps were dropped."""

    def __init__(self, optimizer: Optimizer, layers: dict[str, Int8Layer]) -> None:
        self.layers = layers
        self.skipped = 0
        self._seen_nonfinite = self._count_nonfinite()
        self._before: list[tuple[Tensor, Tensor, float]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._pre_step),
            optimizer.register_step_post_hook(self._post_step),
        ]
        for layer in layers.values():
            layer.hooked = True

    def factors(self) -> dict[str, float]:
        """The learning-rate factor of every layer."""
        return {name: layer.learning_rate_factor() for name, layer in self.layers.items()}

    def remove(self) -> None:
        """Takes the hooks off the optimizer."""
        for handle in self._handles:
            handle.remove()
        for layer in self.layers.values():
            layer.hooked = False

    def _pre_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._must_skip():
            self._drop_gradients(optimizer)
        self._before = []
        for layer in self.layers.values():
            if layer.weight.grad is None:
                continue
            factor = layer.learning_rate_factor()
            if factor != 1.0:
                self._before.append((layer.weight, layer.weight.detach().clone(), factor))

    @torch.no_grad()
    def _post_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for weight, before, factor in self._before:
            weight.sub_(before).mul_(factor).add_(before)
        self._before = []
        for layer in self.layers.values():
            layer.quantizers.iteration.add_(1)

    # ---- on_nonfinite="skip" ----

    def _count_nonfinite(self) -> int:
        return sum(int(layer.quantizers.nonfinite) for layer in self.layers.values())

    def _must_skip(self) -> bool:
        skipping = [layer for layer in self.layers.values() if layer.recipe.on_nonfinite == "skip"]
        if not skipping:
            return False
        count = self._count_nonfinite()
        met = count > self._seen_nonfinite
        self._seen_nonfinite = count
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # All ranks step or none: replicas that disagree would drift apart.
            flag = torch.tensor(int(met), device=skipping[0].weight.device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            met = bool(flag)
        return met

    def _drop_gradients(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self.skipped += 1
        warnings.warn(
            f"byteback: NaN or Inf met while quantizing, so this step's gradients were dropped (skipped {self.skipped} so "
            "far). Many of these in a row mean that training has diverged: lower the learning rate.",
            stacklevel=2,
        )


def scale_learning_rates(optimizer: Optimizer, model: nn.Module) -> LearningRateScaling:
    """Connects an optimizer with a prepared model; call it once, after both exist.

    Needed by recipes with a learning-rate rule and by on_nonfinite="skip"; for the others it only counts iterations.
    """
    inner = _unwrap(optimizer)
    owned = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    every = int8_layers(model, "scale_learning_rates")
    layers = {name: layer for name, layer in every.items() if id(layer.weight) in owned}
    if not layers:
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
    return LearningRateScaling(inner, layers)


def _unwrap(optimizer: Any) -> Optimizer:
    """The optimizer whose step() really updates the weights, below wrappers such as accelerate's."""
    for _ in range(8):
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "optim", None)
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"scale_learning_rates: got a {type(optimizer).__name__}; it needs the torch.optim.Optimizer whose step() updates "
            "the weights. Pass the inner optimizer of your wrapper."
        )
    return optimizer
