# SPDX-License-Identifier: Apache-2.0
"""Recorders and transforms that run a model's forward: what an int8 layer does in each of them, or which error it raises.

    torch.compile, torch.export      work: the layer calls operators of ours, which declare what they write to
    torch.fx, feature extractors     work: the layer is recorded as one module
    torch.jit                        cannot: a script holds neither our operators' settings nor what quantizers remember
    torch.func (grad, vmap, jvp, …)  cannot: a rounded product has no derivative but the one of our backward pass, and one
    forward-mode AD                  quantizer cannot remember a whole batch of calls

torch.func.functional_call alone is an ordinary call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import forward_ad

RECORDED: Any = fx.Proxy
"""What a forward gets in place of a tensor while torch.fx records it."""

_IN_FLOAT = "byteback.enabled(model, False) runs the model in float, where it works"


def record(module: Any, input: Any) -> Any:
    """A call of `module` in the graph that torch.fx is recording."""
    path = input.tracer.path_of_module(module)
    if not path:
        raise RuntimeError(
            f"{module.int8_name}: torch.fx traces this layer itself, but a graph can only call it as a whole. Trace a model "
            "that has it inside, such as nn.Sequential(layer)."
        )
    return input.tracer.create_proxy("call_module", path, (input,), {})


def refuse_transforms(name: str, *tensors: Tensor) -> None:
    """Raises an error where a transform runs the forward of an int8 layer and cannot."""
    if torch.compiler.is_compiling():
        return
    if torch._C._is_tracing():
        raise RuntimeError(
            f"{name}: torch.jit.trace cannot record an int8 layer, whose scales follow the data; trace the plain model "
            "(byteback.restore(copy.deepcopy(model))), or record the int8 one with torch.export."
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            f"{name}: transforms of torch.func (grad, vmap, jvp, ...) cannot pass an int8 layer, which rounds and remembers; "
            f"use loss.backward() for gradients, or {_IN_FLOAT}."
        )
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError(
            f"{name}: forward-mode AD cannot pass an int8 layer, whose rounded product has no such derivative; {_IN_FLOAT}."
        )


def refuse_script(name: str) -> None:
    """The error of torch.jit.script."""
    raise RuntimeError(
        f"{name}: torch.jit.script cannot compile a layer of a prepared model; script the plain model "
        "(byteback.restore(copy.deepcopy(model))), or record the int8 one with torch.export."
    )
