# SPDX-License-Identifier: Apache-2.0
"""What the layers of one prepared model share: the count of their calls within one forward, kept apart by threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

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
