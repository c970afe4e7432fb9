# SPDX-License-Identifier: Apache-2.0
"""Counts the calls of the layers of one prepared model within one forward, separately for each thread.

Calls are counted between `begin_forward` and `end_forward`, which are hooks of a prepared model.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from byteback.ops.backends.cpu import allocator

if TYPE_CHECKING:
    from byteback.nn.undo import Undo

SHARED = "byteback_shared"
"""The attribute of a model in which `prepare` stores the Shared of its layers, so that a forward need not search for it."""


class Calls(threading.local):
    """The call counts of one thread, by layer, within a forward of a prepared model."""

    counting = False  # True within a forward of the prepared model; elsewhere calls have no ordinal

    def __init__(self) -> None:
        self.ordinals: dict[int, int] = {}


class Shared:
    """The state that all layers of one prepared model share."""

    def __init__(self) -> None:
        self.warned = False
        self.counting = False  # as in Calls, but while torch.compile traces, which does not support thread-local data
        self.calls = Calls()
        self.last_input: list[tuple[torch.Size, torch.dtype]] | None = None  # of the model, if it was tensors only
        self.undo: Undo | None = None  # of the last forward of these layers in training mode

    def __getstate__(self) -> dict[str, Any]:
        return {"warned": self.warned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.warned = state["warned"]

    def is_counting(self) -> bool:
        """Whether this thread is within a forward of the prepared model."""
        return self.counting if torch.compiler.is_compiling() else self.calls.counting


def recomputing() -> bool:
    """Whether activation checkpointing is recomputing a forward inside backward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def begin_forward(model: nn.Module, args: Any) -> None:
    """Forward pre-hook of a prepared model. Starts to count calls, and notes the shape of the input for `summary`."""
    _set_counting(model, True)
    if torch.compiler.is_compiling():
        return
    shared: Shared | None = model.__dict__.get(SHARED)
    if shared is not None:
        known = bool(args) and all(isinstance(one, torch.Tensor) for one in args)
        shared.last_input = [(one.shape, one.dtype) for one in args] if known else None


def end_forward(model: nn.Module, _: Any, output: Any) -> None:
    """Forward hook of a prepared model. Stops counting: a layer that is later called alone uses the slot of a first call.

    Between forward and backward the buffers of the forward pass are unused, so they are offered to the system.
    """
    _set_counting(model, False)
    if not torch.compiler.is_compiling() and torch.is_grad_enabled() and not recomputing():
        allocator.offer()


def _set_counting(model: nn.Module, counting: bool) -> None:
    if recomputing():
        return
    if not torch.compiler.is_compiling():
        for calls in _counters(model):
            calls.counting = counting
            calls.ordinals.clear()
        return
    for layer in _layers(model):
        layer.int8_calls = 0 if counting else layer.int8_calls
        layer.int8_shared.counting = counting


def _counters(model: nn.Module) -> list[Calls]:
    """Returns the counters of a model's layers: one, unless the model contains several prepared models."""
    shared: Shared | None = model.__dict__.get(SHARED)
    if shared is not None:
        return [shared.calls]
    return list({id(layer.int8_shared): layer.int8_shared.calls for layer in _layers(model)}.values())


def _layers(model: nn.Module) -> list[Any]:
    """Returns the int8 layers of a model. Skips modules where the user has an attribute of this name."""
    return [module for module in model.modules() if isinstance(getattr(module, "int8_shared", None), Shared)]
