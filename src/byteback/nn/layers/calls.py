# SPDX-License-Identifier: Apache-2.0
"""What the layers of one prepared model share: the count of their calls within one forward, kept apart by threads.

`begin_forward` and `end_forward` are the hooks of a prepared model between which calls are counted.
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
"""Where `prepare` leaves the Shared of a model's layers, so that a forward need not look for it."""


class Calls(threading.local):
    """One thread's forward of a prepared model: the ordinals of its layers' calls, by layer."""

    counting = False  # within a forward of the prepared model, where the ordinal of a call means something

    def __init__(self) -> None:
        self.ordinals: dict[int, int] = {}


class Shared:
    """What the layers of one prepared model have in common."""

    def __init__(self) -> None:
        self.warned = False
        self.counting = False  # the same as in Calls, while torch.compile traces: it cannot follow thread-local data
        self.calls = Calls()
        self.undo: Undo | None = None  # of the last training forward that these layers were part of

    def __getstate__(self) -> dict[str, Any]:
        return {"warned": self.warned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.warned = state["warned"]

    def is_counting(self) -> bool:
        """Whether this thread is within a forward of the prepared model."""
        return self.counting if torch.compiler.is_compiling() else self.calls.counting


def recomputing() -> bool:
    """Whether activation checkpointing is running a forward again, inside backward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def begin_forward(model: nn.Module, _: Any) -> None:
    """Forward pre-hook of a prepared model: calls are counted from here."""
    _set_counting(model, True)


def end_forward(model: nn.Module, _: Any, output: Any) -> None:
    """Forward hook of a prepared model: a layer that is called on its own, later, is a first call.

    Between the passes of a step the buffers of the forward pass are idle, so they are offered to the system.
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
    """The counters of a prepared model's layers: one, unless it was put together from several."""
    shared: Shared | None = model.__dict__.get(SHARED)
    if shared is not None:
        return [shared.calls]
    return list({id(layer.int8_shared): layer.int8_shared.calls for layer in _layers(model)}.values())


def _layers(model: nn.Module) -> list[Any]:
    """The int8 layers of a model: another attribute of that name is the user's."""
    return [module for module in model.modules() if isinstance(getattr(module, "int8_shared", None), Shared)]
