# SPDX-License-Identifier: Apache-2.0
"""Records what the int8 layers of a model read in a prediction, so that an exported file can be compared with it.

Hooks cannot: a layer with a hook does not run as part of a block.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from byteback.nn.layers.layer import Int8Layer


class Seen:
    """The int8 inputs of layers, and the float residuals of blocks, by the name of the layer and the number of its call."""

    def __init__(self) -> None:
        self.inputs: dict[tuple[str, int], Tensor] = {}
        self.residuals: dict[tuple[str, int], Tensor] = {}


class _OfThread(threading.local):
    seen: Seen | None = None


_thread = _OfThread()


@contextmanager
def recorded() -> Iterator[Seen]:
    """Records the predictions of this thread inside the `with`. Other threads may predict, and record, at the same time."""
    before, seen = _thread.seen, Seen()
    _thread.seen = seen
    try:
        yield seen
    finally:
        _thread.seen = before


def saw_input(layer: Int8Layer, slot: int, values: Tensor) -> None:
    """Called with the integers that a layer reads."""
    if torch.compiler.is_compiling():
        return
    seen = _thread.seen
    if seen is not None:
        seen.inputs[layer.int8_name, slot] = values


def saw_residual(layer: Int8Layer, residual: object) -> None:
    """Called with what a block adds; a residual that is stored as int8 is not recorded."""
    if torch.compiler.is_compiling():
        return
    seen = _thread.seen
    if seen is not None and isinstance(residual, Tensor):
        number = sum(name == layer.int8_name for name, _ in seen.residuals)
        seen.residuals[layer.int8_name, number] = residual
