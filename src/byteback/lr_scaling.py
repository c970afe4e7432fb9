# SPDX-License-Identifier: Apache-2.0
"""scale_learning_rates: a per-layer learning-rate factor, as a pair of hooks around the optimizer's step.

A scaled gradient is not a scaled learning rate: under momentum, weight decay or Adam the two differ. So the step is taken
as it is, and then shortened:

    before the step   keep w0 = w
    after the step    w = w0 + φ · (w - w0), nothing where φ is 1

Schedulers, parameter groups, foreach and fused variants and gradient accumulation never notice. The same hooks count
iterations, let several ranks agree on what they measured (nn/ranks.py), and drop the gradients of a step that met NaN or Inf
where the recipe says on_nonfinite="skip".
"""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from byteback.convert import int8_layers
from byteback.nn import Int8Layer, ranks
from byteback.nn.layers.layer import factors
from byteback.nn.layers.weights import refuse_training
from byteback.nn.undo import Watch, drop_step, end_step
from byteback.ops.backends.cpu import allocator
from byteback.ops.contract import layout


class LearningRateScaling:
    """The installed hooks. `factors()` tells what they do now, `skipped` how many steps were dropped."""

    def __init__(self, optimizer: Optimizer, layers: dict[str, Int8Layer], model: nn.Module, process_group: Any = None) -> None:
        self.layers = layers
        self.model = model
        self.skipped = 0
        self._optimizer = weakref.ref(optimizer)  # the optimizer holds us by its hooks; it must be free to go
        self._process_group = process_group
        self._before: list[tuple[list[Int8Layer], Tensor, Any]] = []
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._pre_step),
            optimizer.register_step_post_hook(self._post_step),
            Watch(model),
        ]
        for layer in layers.values():
            if layer.scaling is not None:
                layer.scaling.release(layer)
            layer.hooked, layer.scaling = True, self

    def __getstate__(self) -> dict[str, Any]:
        # A copy is connected to nothing: neither to the optimizer nor to other processes.
        nothing: dict[str, Any] = {"_optimizer": _gone, "_process_group": None, "_before": [], "_handles": []}
        return {**self.__dict__, **nothing}

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

    def release(self, layer: Int8Layer) -> None:
        """Lets go of one layer."""
        self.layers = {name: other for name, other in self.layers.items() if other is not layer}
        layer.hooked, layer.scaling = False, None

    def drop(self, layer: Int8Layer) -> None:
        """Lets go of one layer, which turns float; with the last one the hooks go too."""
        self.release(layer)
        if not self.layers:
            self.remove()

    def optimizer(self) -> Optimizer | None:
        """The optimizer that has the hooks; None if it no longer exists."""
        return self._optimizer()

    @torch.no_grad()
    def _pre_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        for layer in self.layers.values():
            if layer.weight.grad is not None:
                refuse_training(layer, "the optimizer takes a step")
        closure = kwargs.get("closure") or next(iter(args[1:]), None)  # args[0] is the optimizer itself
        if closure is None:
            self._judge_gradients(optimizer)
        stepped = [
            owners
            for owners in self._by_weight()
            if owners[0].weight.grad is not None or (closure is not None and owners[0].weight.requires_grad)
        ]
        # With a closure the gradients, and so the factors, come only during the step.
        known = [None] * len(stepped) if closure is not None else _factors(stepped)
        self._before = [
            (owners, _copy(_shard(owners[0].weight)), factor)
            for owners, factor in zip(stepped, known, strict=True)
            if not _is_one(factor)
        ]
        if closure is None:
            return None

        def guarded() -> Any:
            loss = closure()
            self._judge_gradients(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": guarded}
        return (args[0], guarded, *args[2:]), kwargs

    @torch.no_grad()
    def _post_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        late = _factors([owners for owners, _, factor in self._before if factor is None])
        weights, before, shorter = [], [], []
        for owners, weight, known in self._before:
            factor = late.pop(0) if known is None else known
            if not _is_one(factor):
                weights.append(_shard(owners[0].weight))
                before.append(weight)
                shorter.append(factor)
        self._before = []
        _shorten(weights, before, shorter)
        for layer in self.layers.values():
            layer.quantizers.stepped = True
        if self.layers:
            torch._foreach_add_([layer.quantizers.iteration for layer in self.layers.values()], 1)
        end_step(self.model)

    def _by_weight(self) -> list[list[Int8Layer]]:
        """The layers, those that share a weight together: its step is shortened once."""
        owners: dict[int, list[Int8Layer]] = {}
        for layer in self.layers.values():
            owners.setdefault(id(layer.weight), []).append(layer)
        return list(owners.values())

    # ---- several ranks, and on_nonfinite="skip" ----

    def _judge_gradients(self, optimizer: Optimizer) -> None:
        """Once the gradients are there: ranks agree on what they measured, and drop a step that met NaN or Inf together."""
        layers = list(dict.fromkeys(_int8_modules(self.model)))
        if ranks.are_several(self._process_group):
            bad = ranks.agree(layers, self._process_group)
            met = any(layer.recipe.on_nonfinite == "skip" for layer in bad)
        else:
            met = ranks.met_nonfinite([layer for layer in layers if layer.recipe.on_nonfinite == "skip"])
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


def _factors(groups: list[list[Int8Layer]]) -> list[Any]:
    """The smallest factor of each group of layers, those that share a weight: numbers, or tensors where a look costs time."""
    found = iter(factors([layer for owners in groups for layer in owners]))
    own = [[next(found) for _ in owners] for owners in groups]
    if any(isinstance(factor, Tensor) for row in own for factor in row):
        return [
            torch.stack([torch.as_tensor(f, dtype=torch.float64, device=o[0].weight.device) for f in row]).amin()
            for o, row in zip(groups, own, strict=True)
        ]
    return [min(row) for row in own]


def _is_one(factor: Any) -> bool:
    """Whether a step is taken as it is; a factor that is a tensor is not looked at."""
    return not isinstance(factor, Tensor) and factor == 1.0


def _copy(weight: Tensor) -> Tensor:
    """w0, on a CPU in memory of the pool: it is idle between backward and the next forward, so the copy takes no more."""
    is_dense = weight.is_contiguous() or layout.is_last_dense(weight.shape, weight.stride())
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not is_dense:
        return weight.clone()
    return allocator.empty_like(weight).copy_(weight)


def _shorten(weights: list[Tensor], before: list[Tensor], shorter: list[Any]) -> None:
    """w = w0 + φ · (w - w0) for each weight."""
    if not all(weight.device.type == "cpu" for weight in weights):
        torch._foreach_sub_(weights, before)
        torch._foreach_mul_(weights, shorter)
        torch._foreach_add_(weights, before)
        return
    for weight, w0, factor in zip(weights, before, shorter, strict=True):  # one after the other stays in the caches
        weight.sub_(w0).mul_(factor).add_(w0)


def _shard(weight: Tensor) -> Tensor:
    """What this rank holds of a weight: all of it, or its part of a DTensor (FSDP2)."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def _gone() -> None:
    """The reference to an optimizer that does not exist."""


def _parameters(optimizer: Any) -> set[int]:
    return {id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}


def scale_learning_rates(optimizer: Optimizer, model: nn.Module, *, process_group: Any = None) -> LearningRateScaling:
    """Connects an optimizer with a prepared model; call it once, after both exist.

    Needed by recipes with a learning-rate rule and by on_nonfinite="skip"; for the others it only counts iterations. A model
    whose optimizer is gone can be connected to a new one. Frozen int8 layers that no optimizer holds are connected too: they
    count its steps.

    With several ranks (torch.distributed is initialized) the ranks agree on factors, clips and skipped steps in every step,
    by two small collectives. `process_group` is the group of ranks that train this model together, each of which has to call
    step() when the others do; default: all ranks.

    >>> import byteback
    >>> model = byteback.prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), "unified-int8")
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> byteback.scale_learning_rates(optimizer, model).factors()
    {'1': 1.0}
    """
    wrappers = _unwrap(optimizer)
    inner, every = wrappers[-1], int8_layers(model, "scale_learning_rates")
    # ZeroRedundancyOptimizer's inner one has only the weights that this rank steps; the others come from other ranks.
    owned = set().union(*map(_parameters, wrappers))
    if owned.isdisjoint(id(parameter) for parameter in model.parameters()):
        raise ValueError(
            f"scale_learning_rates: {type(inner).__name__} holds none of this model's {len(every)} int8 weights and no other "
            "parameter of it, so it never steps this model. Build the optimizer from model.parameters() of this very model."
        )
    mine = {name: layer for name, layer in every.items() if id(layer.weight) in owned}
    _refuse_second(inner, model, mine)
    for old in _hooks(inner, model):
        old.remove()  # it had nothing to scale
    # Nobody steps a frozen weight, but its layer may pass gradients on, and then has to know when a step is over.
    frozen = [name for name, layer in every.items() if not layer.weight.requires_grad and _optimizer_of(layer) is None]
    layers = {name: layer for name, layer in every.items() if name in mine or name in frozen}
    return LearningRateScaling(inner, layers, model, process_group)


def _hooks(optimizer: Optimizer, model: nn.Module) -> list[LearningRateScaling]:
    """The pairs of hooks that connect this optimizer with this model already."""
    owners = [getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values()]
    return [owner for owner in owners if isinstance(owner, LearningRateScaling) and owner.model is model]


def _optimizer_of(layer: Int8Layer) -> Optimizer | None:
    """The optimizer that a layer is connected to, if it still exists."""
    return None if layer.scaling is None else layer.scaling.optimizer()


def _refuse_second(optimizer: Optimizer, model: nn.Module, mine: dict[str, Int8Layer]) -> None:
    """An error where an optimizer that exists steps one of the layers already."""
    if _taken(optimizer, model, mine) is not None:
        gc.collect()  # an optimizer that only a cycle of objects refers to is gone, too
    taken = _taken(optimizer, model, mine)
    if taken is not None:
        name, other = taken
        who = "this optimizer" if other is optimizer else f"another optimizer ({type(other).__name__}), which still exists"
        raise ValueError(
            f"scale_learning_rates: {name!r} is connected already, to {who}; a second pair of hooks would count and scale its "
            "steps twice. Keep the first one, or call .remove() on it."
        )


def _taken(optimizer: Optimizer, model: nn.Module, mine: dict[str, Int8Layer]) -> tuple[str, Optimizer] | None:
    """A layer that an optimizer steps already, and that optimizer."""
    for name, layer in mine.items():
        other = _optimizer_of(layer)
        if other is not None and id(layer.weight) in _parameters(other):
            return name, other
    return next(((next(iter(old.layers)), optimizer) for old in _hooks(optimizer, model) if old.layers), None)


def _unwrap(optimizer: Any) -> list[Any]:
    """Wrappers such as accelerate's, from the outside in; last the optimizer whose step() really updates the weights."""
    wrappers = [optimizer]
    for _ in range(8):
        inner = getattr(wrappers[-1], "optimizer", None) or getattr(wrappers[-1], "optim", None)
        if inner is None:
            break
        wrappers.append(inner)
    if not isinstance(wrappers[-1], Optimizer):
        raise TypeError(
            f"scale_learning_rates: got a {type(wrappers[-1]).__name__}; it needs the torch.optim.Optimizer whose step() "
            "updates the weights. Pass the inner optimizer of your wrapper."
        )
    return wrappers
