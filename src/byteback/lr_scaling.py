# SPDX-License-Identifier: Apache-2.0
"""scale_learning_rates: learning-rate factors per layer, applied by two hooks around the step of the optimizer.

Scaling the gradient is not the same as scaling the learning rate: with momentum, weight decay or Adam the results differ. So
the optimizer takes its step as usual, and the hooks scale the change of the weights:

    before the step   save w0 = w
    after the step    w = w0 + φ · (w - w0), nothing if φ is 1

Where the optimizer stores the direction v of its step, w0 is not needed. SGD with momentum, but not Nesterov, has
w = w0 - lr · v:

    after the step    w = w + (1 - φ) · lr · v

This works with schedulers, parameter groups, foreach and fused variants and gradient accumulation. The same hooks count
iterations, share measurements between ranks (nn/ranks.py), and drop the gradients of a step with NaN or Inf if the recipe has
on_nonfinite="skip". Where a backend defers its errors (nn/flags.py), the hooks raise them before the step.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from byteback.convert import int8_layers
from byteback.nn import Int8Layer, flags, ranks
from byteback.nn.layers.computed import weight_parameters
from byteback.nn.layers.layer import factors
from byteback.nn.layers.weights import refuse_training
from byteback.nn.undo import Watch, drop_step, end_step, refuse_step
from byteback.ops.backends.cpu import allocator
from byteback.ops.contract import layout
from byteback.ops.quantizer import may_defer


class _Before(NamedTuple):
    """A weight whose step will be scaled, as it was before the step."""

    owners: list[Int8Layer]
    number: int  # of the weight among the parameters of its layer
    factor: Any  # None if it is only known after the step
    group: dict[str, Any] | None  # the parameter group, if the optimizer stores the direction of its step
    version: int  # of the weight
    w0: Tensor | None  # a copy, if it does not


class LearningRateScaling:
    """The installed hooks. `factors()` returns the current factors, `skipped` is the number of dropped steps."""

    def __init__(self, optimizer: Optimizer, layers: dict[str, Int8Layer], model: nn.Module, process_group: Any = None) -> None:
        self.layers = layers
        self.model = model
        self.skipped = 0
        self._optimizer = weakref.ref(optimizer)  # its hooks refer to this object; a strong reference would keep it alive
        self._process_group = process_group
        self._before: list[_Before] = []
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
        # A copy is not connected to the optimizer, nor to other processes.
        nothing: dict[str, Any] = {"_optimizer": _gone, "_process_group": None, "_before": [], "_handles": []}
        return {**self.__dict__, **nothing}

    def factors(self) -> dict[str, float]:
        """Returns the learning-rate factor of every layer."""
        return {name: layer.learning_rate_factor() for name, layer in self.layers.items()}

    def remove(self) -> None:
        """Removes the hooks from the optimizer."""
        for handle in self._handles:
            handle.remove()
        for layer in self.layers.values():
            layer.hooked, layer.scaling = False, None
        self.layers = {}

    def release(self, layer: Int8Layer) -> None:
        """Disconnects one layer."""
        self.layers = {name: other for name, other in self.layers.items() if other is not layer}
        layer.hooked, layer.scaling = False, None

    def drop(self, layer: Int8Layer) -> None:
        """Disconnects a layer that becomes float. Removes the hooks after the last layer."""
        self.release(layer)
        if not self.layers:
            self.remove()

    def optimizer(self) -> Optimizer | None:
        """Returns the optimizer that has the hooks; None if it no longer exists."""
        return self._optimizer()

    @torch.no_grad()
    def _pre_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        for layer in self.layers.values():
            if layer.int8_frozen is not None and any(weight.grad is not None for weight in weight_parameters(layer)):
                refuse_training(layer, "the optimizer takes a step")
        closure = kwargs.get("closure") or next(iter(args[1:]), None)  # args[0] is the optimizer itself
        if closure is None:
            self._judge_gradients(optimizer)
        stepped = [
            (weight, number, owners)
            for weight, number, owners in self._by_weight()
            if weight.grad is not None or (closure is not None and weight.requires_grad)
        ]
        # With a closure, the gradients and so the factors are only computed during the step.
        known = [None] * len(stepped) if closure is not None else _factors([owners for *_, owners in stepped])
        scaled = [(*own, factor) for own, factor in zip(stepped, known, strict=True) if not _is_one(factor)]
        directed = _directed(optimizer) if scaled else {}
        self._before = [
            _Before(owners, number, factor, group, weight._version, None if group is not None else _copy(_shard(weight)))
            for weight, number, owners, factor in scaled
            for group in [directed.get(id(weight))]
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
        late = _factors([before.owners for before in self._before if before.factor is None])
        weights, saved, shorter = [], [], []
        for owners, number, known, group, version, w0 in self._before:
            factor, weight = late.pop(0) if known is None else known, weight_parameters(owners[0])[number]
            if _is_one(factor):
                continue
            if w0 is None:
                _step_back(optimizer, group, weight, factor, version)
                continue
            weights.append(_shard(weight))
            saved.append(w0)
            shorter.append(factor)
        self._before = []
        _shorten(weights, saved, shorter)
        every: list[Any] = [layer._modules["quantizers"] for layer in self.layers.values()]
        for numerics in every:
            numerics.__dict__["stepped"] = True  # nn.Module would search its parameters for the name
        if every:
            torch._foreach_add_([numerics._buffers["iteration"] for numerics in every], 1)
        end_step(self.model)

    def _by_weight(self) -> list[tuple[Tensor, int, list[Int8Layer]]]:
        """Returns each weight, its number in the first layer that has it, and all these layers: its step is scaled only once.

        A weight that is computed has several parameters (nn/layers/computed.py), and the steps of all of them are scaled.
        """
        owners: dict[int, tuple[Tensor, int, list[Int8Layer]]] = {}
        for layer in self.layers.values():
            for number, weight in enumerate(weight_parameters(layer)):
                owners.setdefault(id(weight), (weight, number, []))[2].append(layer)
        return list(owners.values())

    # ---- several ranks, and on_nonfinite="skip" ----

    def _judge_gradients(self, optimizer: Optimizer) -> None:
        """Shares measurements between ranks, once all gradients exist, and drops the step on all ranks if it has NaN or Inf."""
        layers = list(dict.fromkeys(_int8_modules(self.model)))
        error = None
        if ranks.are_several(self._process_group):
            bad, error = ranks.agree(layers, self._process_group)
            met = any(layer.recipe.on_nonfinite == "skip" for layer in bad)
        elif may_defer() and flags.any_defers(layer.quantizers for layer in layers):
            read = flags.read([layer.quantizers for layer in layers if layer.recipe.on_nonfinite != "propagate"])
            error, met = read.error, any(numerics.settings["input"].on_nonfinite == "skip" for numerics in read.met)
        else:
            met = ranks.met_nonfinite([layer for layer in layers if layer.recipe.on_nonfinite == "skip"])
        if error is not None:  # a backend has deferred it until now
            self._clear_gradients(optimizer)
            refuse_step(self.model)
            self._before = []
            raise error
        if met:
            self._drop_gradients(optimizer)

    def _clear_gradients(self, optimizer: Optimizer) -> None:
        # Also the gradients of other optimizers of this model: the whole step is dropped.
        own = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for parameter in (*self.model.parameters(), *own):
            parameter.grad = None

    def _drop_gradients(self, optimizer: Optimizer) -> None:
        self._clear_gradients(optimizer)
        drop_step(self.model)
        self.skipped += 1
        warnings.warn(
            f"byteback: found NaN or Inf while quantizing, so this step's gradients were dropped ({self.skipped} skipped so "
            "far). If this happens many times in a row, training has diverged: lower the learning rate.",
            stacklevel=2,
        )


def _int8_modules(model: nn.Module) -> list[Int8Layer]:
    """Returns the int8 layers that a model has now. A layer may be listed twice. Faster than model.modules()."""
    found, waiting = [], [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, Int8Layer):
            found.append(module)
        elif module._modules:
            waiting += [child for child in module._modules.values() if child is not None]
    return found


def _factors(groups: list[list[Int8Layer]]) -> list[Any]:
    """Returns the smallest factor of each group of layers that share a weight: numbers, or tensors if reading them is slow."""
    found = iter(factors([layer for owners in groups for layer in owners]))
    own = [[next(found) for _ in owners] for owners in groups]
    if any(isinstance(factor, Tensor) for row in own for factor in row):
        devices = [owners[0].quantizers.count.device for owners in groups]
        return [torch.stack([_on_device(f, at) for f in row]).amin() for at, row in zip(devices, own, strict=True)]
    return [min(row) for row in own]


def _on_device(factor: Any, device: torch.device) -> Tensor:
    """Returns a factor as a float64 number on a device. A number of the host is written by a kernel, not copied."""
    if isinstance(factor, Tensor):
        return factor.to(device, torch.float64)
    return torch.full((), factor, dtype=torch.float64, device=device)


def _is_one(factor: Any) -> bool:
    """Whether a factor is known to be 1. The value of a tensor is not read."""
    return not isinstance(factor, Tensor) and factor == 1.0


def _directed(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """Returns the groups of the weights, by id(), for which the optimizer stores the direction of its step.

    The fused SGD may skip the step without a sign (under a GradScaler), and a learning rate in a tensor is slow to read.
    """
    if type(optimizer) is not SGD:
        return {}
    found = {}
    for group in optimizer.param_groups:
        plain = not (group["nesterov"] or group["fused"] or group["differentiable"]) and isinstance(group["lr"], float | int)
        if plain and group["momentum"]:
            found.update({id(weight): group for weight in group["params"]})
    return found


def _step_back(optimizer: Optimizer, group: Any, weight: Tensor, factor: Any, version: int) -> None:
    """w = w + (1 - φ) · lr · v. Nothing if the optimizer did not step, because another hook has removed the gradient."""
    if weight._version == version:
        return
    own, direction = _shard(weight), _shard(optimizer.state[weight]["momentum_buffer"])
    if isinstance(factor, Tensor):  # not read: its value would have to be waited for
        own.add_(direction * ((1.0 - factor) * group["lr"]).to(direction.dtype))
    else:
        own.add_(direction, alpha=(1.0 - factor) * group["lr"])


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
    """Returns the part of a weight on this rank: all of it, or the local part of a DTensor (FSDP2)."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def _gone() -> None:
    """A reference to an optimizer that no longer exists."""


def _parameters(optimizer: Any) -> set[int]:
    return {id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}


def scale_learning_rates(optimizer: Optimizer, model: nn.Module, *, process_group: Any = None) -> LearningRateScaling:
    """Connects an optimizer with a prepared model. Call it once, after both were created.

    Recipes with a learning-rate rule and on_nonfinite="skip" need it. For other recipes it only counts iterations. If the
    optimizer of a model no longer exists, the model can be connected to a new one. Int8 layers whose weight does not require
    gradients, and which are not connected to another optimizer, are connected too: they count its steps.

    With several ranks (torch.distributed is initialized), all ranks get the same factors, clips and skipped steps in every
    step, by two small collectives. `process_group` is the group of ranks that train this model together (default: all ranks).
    All of them must call step() at the same time.

    >>> import byteback
    >>> model = byteback.prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), "unified-int8")
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> byteback.scale_learning_rates(optimizer, model).factors()
    {'1': 1.0}
    """
    wrappers = _unwrap(optimizer)
    inner, every = wrappers[-1], int8_layers(model, "scale_learning_rates")
    # The inner optimizer of ZeroRedundancyOptimizer has only the weights that this rank updates; other ranks send the rest.
    owned = set().union(*map(_parameters, wrappers))
    if owned.isdisjoint(id(parameter) for parameter in model.parameters()):
        raise ValueError(
            f"scale_learning_rates: {type(inner).__name__} has none of the {len(every)} int8 weights of this model and no "
            "other parameter of it, so it never updates this model. Create the optimizer from its model.parameters()."
        )
    mine = {name: layer for name, layer in every.items() if any(id(one) in owned for one in weight_parameters(layer))}
    _refuse_second(inner, model, mine)
    for old in _hooks(inner, model):
        old.remove()  # it has no layers
    # A weight without requires_grad is never updated, but its layer may compute grad_input, and then needs to count steps.
    frozen = [name for name, layer in every.items() if _is_fixed(layer) and _optimizer_of(layer) is None]
    layers = {name: layer for name, layer in every.items() if name in mine or name in frozen}
    return LearningRateScaling(inner, layers, model, process_group)


def _is_fixed(layer: Int8Layer) -> bool:
    """Whether no parameter of the weight is trained."""
    return not any(weight.requires_grad for weight in weight_parameters(layer))


def _hooks(optimizer: Optimizer, model: nn.Module) -> list[LearningRateScaling]:
    """Returns the hooks that already connect this optimizer with this model."""
    owners = [getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values()]
    return [owner for owner in owners if isinstance(owner, LearningRateScaling) and owner.model is model]


def _optimizer_of(layer: Int8Layer) -> Optimizer | None:
    """Returns the optimizer that a layer is connected to; None if there is none or it no longer exists."""
    return None if layer.scaling is None else layer.scaling.optimizer()


def _refuse_second(optimizer: Optimizer, model: nn.Module, mine: dict[str, Int8Layer]) -> None:
    """Raises an error if one of the layers is already connected to an optimizer that still exists."""
    if _taken(optimizer, model, mine) is not None:
        gc.collect()  # frees an optimizer that is only part of a reference cycle
    taken = _taken(optimizer, model, mine)
    if taken is not None:
        name, other = taken
        who = "this optimizer" if other is optimizer else f"another optimizer ({type(other).__name__}), which still exists"
        raise ValueError(
            f"scale_learning_rates: {name!r} is already connected to {who}; a second pair of hooks would count and scale its "
            "steps twice. Keep the first one, or call .remove() on it."
        )


def _taken(optimizer: Optimizer, model: nn.Module, mine: dict[str, Int8Layer]) -> tuple[str, Optimizer] | None:
    """Returns a layer that is already connected, and its optimizer; None if there is none."""
    for name, layer in mine.items():
        other = _optimizer_of(layer)
        if other is not None and any(id(one) in _parameters(other) for one in weight_parameters(layer)):
            return name, other
    return next(((next(iter(old.layers)), optimizer) for old in _hooks(optimizer, model) if old.layers), None)


def _unwrap(optimizer: Any) -> list[Any]:
    """Returns the wrappers of an optimizer, such as accelerate's, from outer to inner. The last one updates the weights."""
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
