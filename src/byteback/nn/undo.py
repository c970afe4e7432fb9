# SPDX-License-Identifier: Apache-2.0
"""Restores the buffers of a model after a training step that failed or was dropped because of NaN or Inf.

A forward pass changes the running statistics of norms and the state of quantizers, and a backward pass changes the latter. NaN
is detected later: by the next int8 layer, in backward, or by the optimizer's hook. So all buffers, also those of the user's
modules, are copied at the start of a forward pass in training, and restored after

    NonFiniteError in forward      to the values before this forward
    NonFiniteError in backward     to the values before the forward that it belongs to, if no other forward has started since
    on_nonfinite="skip"            to the values before the first forward since the last optimizer step, when the hooks drop
                                   the step

Where errors are deferred because a look at a tensor costs time (ops/refusals.py), a step is open until its flags are read:

    by the optimizer's hook        which raises before the step, after it restored the values before the first forward
    by the next forward            if there is no hook; it restores the values before the forward that failed

The buffers are small: for ResNet-50 the copy takes less than 0.7 ms, and a step takes seconds. Two counters are not
restored: `count`, which selects the noise, and `nonfinite`. With "propagate", NaN is handled by the user, as in PyTorch, and
nothing is copied. torch.compile supports "skip", but after an error in a compiled graph nothing is restored.
"""

from __future__ import annotations

import sys
import threading
import weakref
from operator import attrgetter, is_
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from byteback.nn import flags
from byteback.nn.layers.calls import Shared, recomputing
from byteback.nn.layers.numerics import LayerNumerics
from byteback.nn.layers.weights import refuse_training
from byteback.ops.backends.cpu.copying import Copying
from byteback.ops.quantizer import may_defer
from byteback.quantize import NONFINITE, NonFiniteError, Quantizer

UNDO = "byteback_undo"
"""The attribute in which a watched model stores its Undo."""

_UNSHARED = "unshared"
"""A tensor of a quantizer, not a buffer. Its count of tensors with NaN is not restored: the optimizer's hooks clear it."""

Step = tuple["Undo", int]
"""The forward that a gradient belongs to."""


class _Running(threading.local):
    undo: Undo | None = None  # the Undo of the outermost model whose forward runs in this thread


_running = _Running()
_OWNED = attrgetter("_modules", "_buffers")
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # missing in the oldest supported PyTorch


class Undo:
    """Copies of the buffers of one model from before the current step, which may still fail or be dropped."""

    def __init__(self) -> None:
        self.users = 0
        self.number = 0  # how many copies were made so far
        self._is_valid = False
        self._is_open = False  # the step of the copy continues until the optimizer's hooks end it
        self._defers = False  # looks cost time on the device of the buffers
        self._is_unread = False  # a backend that defers has run since flags were read, and no hook will read them
        self._was_dropped = False
        self._places: list[tuple[nn.Module, str]] = []
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._again: Copying | None = None  # copies them again
        self._found: _Found | None = None
        self._handled: BaseException | None = None  # the error that was being handled when the forward started

    def __reduce__(self) -> tuple[type[Undo], tuple[()]]:
        return Undo, ()  # a copy of a model has not started a step

    # ---- before a step ----

    def begin(self, model: nn.Module) -> None:
        """Copies the buffers, unless a step is already in progress."""
        found = self._found
        if found is None or not found.still_holds():
            found = self._found = _Found(model)
        found.enter(self)
        self._handled = sys.exc_info()[1]
        if self._is_open and self._defers and not found.is_hooked:  # the hooks were removed in the middle of a step
            self._is_open, self._is_unread = False, True
        if self._is_unread:
            self._read(found.layers)
        if found.policies <= {"propagate"}:
            self.forget()
            return
        if self._is_open:
            return
        self._copy(found)
        self.number += 1
        self._is_valid = True
        self._defers = flags.any_defers(found.one_of_each)
        self._is_open = (self._defers or "skip" in found.policies) and found.is_hooked and torch.is_grad_enabled()
        self._is_unread = self._defers and not self._is_open

    def begin_prediction(self, model: nn.Module) -> None:
        """A prediction moves no buffer, but a gradient of it may be refused. Nothing is to be done where no step defers."""
        layers = flags.numerics_of(model)
        if self._is_unread:
            self._read(layers)
        hooked = any(module.__dict__.get("hooked", False) for module in model.modules())
        if torch.is_grad_enabled() and not self._is_open and not hooked and flags.any_defers(layers):
            self.forget()  # the flags of the training forward before were good
            self._is_unread = True

    def _read(self, layers: list[LayerNumerics]) -> None:
        """Raises what was deferred until now."""
        self._is_unread = False
        error = flags.read_errors(layers)
        if error is not None:
            self.refuse()
            raise error

    def begin_traced(self, model: nn.Module) -> None:
        """Does the same in a graph of torch.compile, only for steps that the optimizer's hooks may drop, not for errors."""
        if self._is_open:
            return
        places, tensors, skips = [], [], False
        for module in model.modules():
            shared = getattr(module, "int8_shared", None)
            if isinstance(shared, Shared):
                shared.undo = self
                layer: Any = module
                skips = skips or (layer.hooked and layer.recipe.on_nonfinite == "skip")
            names = ["iteration"] if isinstance(module, LayerNumerics) else list(module._buffers)
            for name in names:
                buffer = module._buffers[name]
                if buffer is not None:
                    places.append((module, name))
                    tensors.append(buffer)
        if skips and torch.is_grad_enabled():
            self._places, self._tensors = places, tensors
            self._copies = [tensor.clone() for tensor in tensors]
            self._again = None
            self._is_valid = self._is_open = True

    def _copy(self, found: _Found) -> None:
        known, self._places, self._tensors = self._tensors, found.places, found.tensors
        # Outside of inference mode: later steps could not write to inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            if self._again is not None and len(known) == len(self._tensors) and all(map(is_, known, self._tensors)):
                self._again.copy()
            else:
                self._copies = [tensor.clone() for tensor in self._tensors]
                self._again = Copying(self._copies, self._tensors)

    def covers(self, module: nn.Module) -> bool:
        """Whether the copies of the running forward are also those of this module, which has an Undo of its own."""
        return self._found is not None and self._found.has(module)

    # ---- after it ----

    def put_back(self, number: int | None = None) -> None:
        """Restores the buffers. Does nothing if `number` is given and the copy belongs to another forward."""
        if not self._is_valid or number not in (None, self.number):
            return
        with torch.no_grad():
            changed = iter(flags.changed(self._tensors, self._copies) if self._defers else ())
            for (module, name), tensor, before in zip(self._places, self._tensors, self._copies, strict=True):
                now, differs = module._buffers.get(name), next(changed, None)
                if name == _UNSHARED and isinstance(module, Quantizer):
                    tensor[:, :NONFINITE] = before[:, :NONFINITE]
                elif now is tensor:
                    if not torch.equal(tensor, before) if differs is None else differs:
                        tensor.copy_(before)
                elif now is not None:  # the forward has replaced the tensor
                    module._buffers[name] = before.to(now.device, copy=True)

    def drop(self) -> None:
        """Called when the optimizer's hook drops this step."""
        self.put_back()
        self._was_dropped = True

    def refuse(self) -> None:
        """An error ends this step, after its gradients were computed."""
        self.put_back()
        self.forget()

    def end(self) -> None:
        """Called after the step of the optimizer."""
        if self._was_dropped:
            self.put_back()  # also restores what the hooks have counted since
        self._was_dropped = False
        self.forget()

    def forget(self) -> None:
        """Discards the copy: nothing can be restored until the next forward."""
        self._is_valid = self._is_open = self._is_unread = False


class _Found:
    """The buffers of a model that a step may write to, the policies of its layers, and whether an optimizer is connected.

    A walk through all modules takes longer than copying their buffers, so it is kept as long as it holds. Modules are held
    weakly, because the model holds this object.
    """

    def __init__(self, model: nn.Module) -> None:
        self.places: list[tuple[nn.Module, str]] = []
        self.tensors: list[Tensor] = []
        self.policies: set[str] = set()
        self.layers: list[LayerNumerics] = []
        self.one_of_each: list[LayerNumerics] = []  # of each device
        self.is_hooked = False
        self._int8: list[tuple[Any, Shared]] = []
        # All modules, and the ids of their children and buffers. Children are modules of this list, and the buffers are kept,
        # so that no other object gets one of these ids.
        self._seen: list[Any] = []
        known, waiting = {model}, [model]
        while waiting:  # cheaper than model.modules()
            module = waiting.pop()
            self._look_at(module)
            self._seen.append(ref(module))
            for child in module._modules.values():
                if child is not None and child not in known:
                    known.add(child)
                    waiting.append(child)
        self.one_of_each = list({layer.unshared.device: layer for layer in self.layers}.values())
        parts = _parts([known() for known in self._seen])
        self._ids, self._buffers = list(map(id, parts)), [part for part in parts if isinstance(part, Tensor)]

    def _look_at(self, module: nn.Module) -> None:
        shared = module.__dict__.get("int8_shared")
        if isinstance(shared, Shared):  # not another attribute of this name, set by the user
            self._int8.append((ref(module), shared))
        if not module._buffers:
            return
        names = list(module._buffers)
        if isinstance(module, LayerNumerics):
            self.policies.add(module.settings["input"].on_nonfinite)
            self.layers.append(module)
            names = ["iteration"]
        for name in names:
            buffer = module._buffers[name]
            if buffer is not None and _can_be_copied(buffer):
                self.places.append((module, name))
                self.tensors.append(buffer)
        if isinstance(module, Quantizer) and not module.unshared.is_meta:
            self.places.append((module, _UNSHARED))
            self.tensors.append(module.unshared)

    def still_holds(self) -> bool:
        """Whether the model has the same modules, with the same tensors as buffers."""
        modules = [known() for known in self._seen]
        if None in modules or list(map(id, _parts(modules))) != self._ids:
            return False
        return all(known().__dict__.get("int8_shared") is shared for known, shared in self._int8)

    def enter(self, undo: Undo) -> None:
        """A training forward begins: refuses frozen layers, and connects the others with `undo`."""
        self.is_hooked = False
        for known, shared in self._int8:
            module = known()
            if module.training:  # before any other layer changes its state, such as a float norm before it
                refuse_training(module, "the model was called in training mode")
            shared.undo = undo
            self.is_hooked = self.is_hooked or module.__dict__["hooked"]

    def has(self, module: nn.Module) -> bool:
        """Whether this module is the model or one of its modules."""
        return any(known() is module for known in self._seen)


def _parts(modules: list[Any]) -> list[Any]:
    """Returns the children and buffers of modules, a None after those of each, in one list that is fast to compare."""
    parts: list[Any] = []
    for children, buffers in map(_OWNED, modules):
        parts += children.values()
        parts += buffers.values()
        parts.append(None)
    return parts


def _can_be_copied(buffer: Tensor) -> bool:
    return not (buffer.is_meta or buffer.layout is not torch.strided or is_lazy(buffer))


# ---- the hooks around a forward --------------------------------------------------------------------------------------


class Watch:
    """Adds the hooks to a model. They are removed with the last Watch."""

    def __init__(self, model: nn.Module) -> None:
        if UNDO not in model.__dict__:
            model.__dict__[UNDO] = Undo()
            model.register_forward_pre_hook(_begin)
            model.register_forward_hook(_end, always_call=True)
        undo: Undo = model.__dict__[UNDO]
        undo.users += 1
        # Weak references, so that an unused model is freed at once.
        self._model, self._undo, self._is_on = weakref.ref(model), weakref.ref(undo), True

    def remove(self) -> None:
        """Removes the hooks if no other Watch needs them."""
        model, undo, was_on = self._model(), self._undo(), self._is_on
        self._is_on = False
        is_there = model is not None and model.__dict__.get(UNDO) is undo
        if was_on and is_there and model is not None and undo is not None:
            undo.users -= 1
            if not undo.users:
                unwatch(model)


def unwatch(module: nn.Module) -> None:
    """Removes the hooks from a module, whatever Watch added them."""
    if module.__dict__.pop(UNDO, None) is None:
        return
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for handle, hook in list(hooks.items()):
            if hook in (_begin, _end):
                del hooks[handle]
                module._forward_hooks_always_called.pop(handle, None)


def _begin(model: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():
        if model.training and not _is_exporting():
            getattr(model, UNDO).begin_traced(model)
        return
    if not _can_watch():
        return
    undo, outer = model.__dict__[UNDO], _running.undo
    if outer is not None and outer is not undo and outer.covers(model):
        return
    _running.undo = None  # it may be left from an interrupted forward
    if model.training:
        undo.begin(model)
        _running.undo = undo
    elif undo._is_unread or (may_defer() and torch.is_grad_enabled()):
        undo.begin_prediction(model)


def _end(model: nn.Module, _: Any, output: Any) -> None:
    if not _can_watch() or _running.undo is not model.__dict__[UNDO]:
        return
    undo, _running.undo = model.__dict__[UNDO], None
    error = sys.exc_info()[1]  # the hook is called while the error of the forward is handled
    if isinstance(error, NonFiniteError) and error is not undo._handled:
        undo.put_back()


def _can_watch() -> bool:
    """Whether this is an ordinary forward: not under torch.compile, a tracer or a transform, and not recomputed."""
    if torch.compiler.is_compiling() or recomputing():
        return False
    return not (
        torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


# ---- called by layers and by the optimizer's hooks --------------------------------------------------------------------


def current_step() -> Step | None:
    """Returns the step of the running forward, for its backward pass."""
    undo = None if torch.compiler.is_compiling() else _running.undo
    return None if undo is None else (undo, undo.number)


def undo_step(step: Step | None) -> None:
    """Restores the buffers after a NonFiniteError in a backward pass."""
    if step is not None:
        undo, number = step
        undo.put_back(number)


def drop_step(model: nn.Module) -> None:
    """Restores the buffers after the hooks dropped the gradients of this step."""
    for undo in _undos(model):
        undo.drop()


def refuse_step(model: nn.Module) -> None:
    """The hooks raise an error that was deferred: the model becomes what it was before the step."""
    for undo in _undos(model):
        undo.refuse()


def end_step(model: nn.Module) -> None:
    """Called after the step of the optimizer: the next forward starts a new step."""
    for undo in _undos(model):
        undo.end()


def _undos(model: nn.Module) -> set[Undo]:
    """Returns the Undos of the last training forwards of the model's int8 layers."""
    found, waiting = {}, [model]
    while waiting:  # cheaper than model.modules()
        module = waiting.pop()
        shared = module.__dict__.get("int8_shared")
        if isinstance(shared, Shared):
            found[id(shared)] = shared
        elif module._modules:
            waiting += [child for child in module._modules.values() if child is not None]
    return {shared.undo for shared in found.values() if shared.undo is not None}
