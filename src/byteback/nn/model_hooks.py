# SPDX-License-Identifier: Apache-2.0
"""The hooks around a forward pass of a prepared model: its layers' calls are counted within."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from byteback.nn.calls import SHARED, Calls, Shared, recomputing
from byteback.nn.layer import Int8Layer
from byteback.ops.backends.cpu import allocator


def begin_forward(model: nn.Module, _: Any) -> None:
    """Forward pre-hook of a prepared model: calls are counted from here."""
    _set_counting(model, True)


def end_forward(model: nn.Module, _: Any, output: Any) -> None:
    """Forward hook of a prepared model: a layer that is called on its own, later, is a first call.

    Between the passes of a step the buffers of the forward pass are idle, and the system may have them.
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
    for module in model.modules():
        if isinstance(module, Int8Layer):
            module.int8_calls = 0 if counting else module.int8_calls
            module.int8_shared.counting = counting


def _counters(model: nn.Module) -> list[Calls]:
    """The counters of a prepared model's layers: one, unless it was put together from several."""
    shared: Shared | None = model.__dict__.get(SHARED)
    if shared is not None:
        return [shared.calls]
    return list(
        {id(layer.int8_shared): layer.int8_shared.calls for layer in model.modules() if isinstance(layer, Int8Layer)}.values()
    )
