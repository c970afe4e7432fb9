# SPDX-License-Identifier: Apache-2.0
"""A training step that is refused or dropped leaves no trace: the model's buffers become again what they were before it.

A forward pass moves the running statistics of norms and what quantizers remember, a backward pass the latter. That NaN has come
in is found out later: by the next int8 layer, in backward, by the optimizer's hook. So all buffers, also the user's own, are
copied when a forward pass in training begins, and put back after

    NonFiniteError in forward      as before this forward
    NonFiniteError in backward     as before the forward that it belongs to, if no other has begun since
    on_nonfinite="skip"            as before the first forward since the last optimizer step, when the hooks drop the step

Where errors are deferred (ops/refusals.py: a look at a tensor costs time there) a step is open until its flags are read:

    by the optimizer's hook        which raises before the step, with all buffers as before its first forward
    by the next forward            where there is no hook; the buffers are those before the forward that was refused

They are small: for ResNet-50 the copy takes 0.7 ms, of a step of seconds. Two counters go on: `count`, which names noise, and
`nonfinite`. Under "propagate" NaN is left to the user, as in PyTorch, and nothing is copied. torch.compile keeps "skip", but
an error in a compiled graph puts nothing back.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from byteback.nn import flags
from byteback.nn.layers.calls import Shared, recomputing
from byteback.nn.layers.numerics import LayerNumerics
from byteback.nn.layers.weights import refuse_training
from byteback.ops.quantizer import may_defer
from byteback.quantize import NONFINITE, NonFiniteError, Quantizer

UNDO = "byteback_undo"
"""Where a model that is watched has its Undo."""

_UNSHARED = "unshared"
"""Of a quantizer; it is no buffer. How many tensors held NaN is not put back: the optimizer's hooks read and clear it."""

Step = tuple["Undo", int]
"""The forward that a gradient belongs to."""


class _Running(threading.local):
    undo: Undo | None = None  # of the outermost model whose forward is running in this thread


_running = _Running()
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # younger than the oldest PyTorch that is supported


class Undo:
    """The buffers of one model as they were before the step that may still be refused."""

    def __init__(self) -> None:
        self.users = 0
        self.number = 0  # of copies made so far
        self._is_valid = False
        self._is_open = False  # the step that the copy is of goes on until the optimizer's hooks end it
        self._defers = False  # looks cost time where the buffers are
        self._is_unread = False  # a backend that defers has run since flags were read, and no hook will read them
        self._was_dropped = False
        self.members: set[int] = set()  # by id(): the model may not be held by what it holds
        self._places: list[tuple[nn.Module, str]] = []
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._handled: BaseException | None = None  # the error that was being handled when the forward began

    def __reduce__(self) -> tuple[type[Undo], tuple[()]]:
        return Undo, ()  # a copy of a model has not begun a step

    # ---- before a step ----

    def begin(self, model: nn.Module) -> None:
        """Remembers the buffers, unless they are those in the middle of a step."""
        found = _Found(model, self)
        self.members = {id(module) for module in found.modules if UNDO in module.__dict__}
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
        self._defers = flags.any_defers(found.layers)
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
        """The same in a graph of torch.compile, for steps that the optimizer's hooks may drop: errors do not come by there."""
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
            self._is_valid = self._is_open = True

    def _copy(self, found: _Found) -> None:
        known, self._places, self._tensors = self._tensors, found.places, found.tensors
        # Not as inference tensors, which later steps could not write to.
        with torch.inference_mode(False), torch.no_grad():
            if known and len(known) == len(self._tensors) and all(map(_same, known, self._tensors)):
                torch._foreach_copy_(self._copies, self._tensors)
            else:
                self._copies = [tensor.clone() for tensor in self._tensors]

    # ---- after it ----

    def put_back(self, number: int | None = None) -> None:
        """The buffers as they were, unless the copy is of another forward than the one that is meant."""
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
                elif now is not None:  # the forward has put another tensor in its place
                    module._buffers[name] = before.to(now.device, copy=True)

    def drop(self) -> None:
        """The optimizer's hook drops this step."""
        self.put_back()
        self._was_dropped = True

    def refuse(self) -> None:
        """An error ends this step, after its gradients were computed."""
        self.put_back()
        self.forget()

    def end(self) -> None:
        """The optimizer has stepped."""
        if self._was_dropped:
            self.put_back()  # what the hooks have counted since
        self._was_dropped = False
        self.forget()

    def forget(self) -> None:
        """Nothing can be put back until the next forward."""
        self._is_valid = self._is_open = self._is_unread = False


class _Found:
    """The buffers of a model that a step may write to, its layers' policies, and whether an optimizer is connected to one."""

    def __init__(self, model: nn.Module, undo: Undo) -> None:
        self.places: list[tuple[nn.Module, str]] = []
        self.tensors: list[Tensor] = []
        self.policies: set[str] = set()
        self.is_hooked = False
        self.layers: list[LayerNumerics] = []
        self.modules, waiting = {model}, [model]
        while waiting:  # cheaper than model.modules()
            module = waiting.pop()
            self._look_at(module, undo)
            for child in module._modules.values():
                if child is not None and child not in self.modules:
                    self.modules.add(child)
                    waiting.append(child)

    def _look_at(self, module: nn.Module, undo: Undo) -> None:
        own = module.__dict__
        shared = own.get("int8_shared")
        if isinstance(shared, Shared):  # and not an attribute of the user's that has this name
            if module.training:  # before any other layer moves, such as a float norm ahead of it
                refuse_training(module, "the model was called in training mode")
            shared.undo = undo
            self.is_hooked = self.is_hooked or own["hooked"]
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


def _can_be_copied(buffer: Tensor) -> bool:
    return not (buffer.is_meta or buffer.layout is not torch.strided or is_lazy(buffer))


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b


# ---- the hooks around a forward --------------------------------------------------------------------------------------


class Watch:
    """Hooks on a model; they go with the last that wanted them."""

    def __init__(self, model: nn.Module) -> None:
        if UNDO not in model.__dict__:
            model.__dict__[UNDO] = Undo()
            model.register_forward_pre_hook(_begin)
            model.register_forward_hook(_end, always_call=True)
        undo: Undo = model.__dict__[UNDO]
        undo.users += 1
        # Weakly: a model that nobody needs is freed at once.
        self._model, self._undo, self._is_on = weakref.ref(model), weakref.ref(undo), True

    def remove(self) -> None:
        """Takes them off."""
        model, undo, was_on = self._model(), self._undo(), self._is_on
        self._is_on = False
        is_there = model is not None and model.__dict__.get(UNDO) is undo
        if was_on and is_there and model is not None and undo is not None:
            undo.users -= 1
            if not undo.users:
                unwatch(model)


def unwatch(module: nn.Module) -> None:
    """Takes the hooks off a module, whoever wanted them."""
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
    if outer is not None and outer is not undo and id(model) in outer.members:
        return
    _running.undo = None  # an interrupted forward has left it
    if model.training:
        undo.begin(model)
        _running.undo = undo
    elif undo._is_unread or (may_defer() and torch.is_grad_enabled()):
        undo.begin_prediction(model)


def _end(model: nn.Module, _: Any, output: Any) -> None:
    if not _can_watch() or _running.undo is not model.__dict__[UNDO]:
        return
    undo, _running.undo = model.__dict__[UNDO], None
    error = sys.exc_info()[1]  # the hook is called where the forward's error is handled
    if isinstance(error, NonFiniteError) and error is not undo._handled:
        undo.put_back()


def _can_watch() -> bool:
    """Whether this forward computes numbers of a step: torch.compile, tracers and transforms do not, nor does recomputation."""
    if torch.compiler.is_compiling() or recomputing():
        return False
    return not (
        torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


# ---- what a layer and the optimizer's hooks ask -----------------------------------------------------------------------


def current_step() -> Step | None:
    """The step that the running forward belongs to, for its backward pass."""
    undo = None if torch.compiler.is_compiling() else _running.undo
    return None if undo is None else (undo, undo.number)


def undo_step(step: Step | None) -> None:
    """NonFiniteError in a backward pass: the step is refused."""
    if step is not None:
        undo, number = step
        undo.put_back(number)


def drop_step(model: nn.Module) -> None:
    """The hooks drop the gradients of this step, so the model forgets its forwards too."""
    for undo in _undos(model):
        undo.drop()


def refuse_step(model: nn.Module) -> None:
    """The hooks raise an error that was deferred: the model becomes what it was before the step."""
    for undo in _undos(model):
        undo.refuse()


def end_step(model: nn.Module) -> None:
    """The optimizer has stepped: the next forward begins another step."""
    for undo in _undos(model):
        undo.end()


def _undos(model: nn.Module) -> set[Undo]:
    """Those of the last training forwards of the model's int8 layers."""
    shared = (module.__dict__.get("int8_shared") for module in model.modules())
    return {known.undo for known in shared if isinstance(known, Shared) and known.undo is not None}
