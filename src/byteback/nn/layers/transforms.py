# SPDX-License-Identifier: Apache-2.0
"""Which recorders and transforms of PyTorch support int8 layers, and the errors of those that do not.

    torch.compile, torch.export      supported: the layer calls custom operators, which declare what they write to
    torch.fx, feature extractors     supported: the layer is recorded as one module
    torch.jit                        not supported: a script cannot contain the settings of the operators or quantizer state
    torch.func (grad, vmap, jvp, …)  not supported: the only derivative of a rounded product is that of our backward pass, and
    forward-mode AD                  the state of a quantizer is for one call, not for a batch of calls

torch.func.functional_call alone is an ordinary call and is supported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import forward_ad

RECORDED: Any = fx.Proxy
"""The type of the input of a forward while torch.fx records it."""

_IN_FLOAT = "byteback.enabled(model, False) runs the model in float, which supports this"


def record(module: Any, input: Any, **options: Any) -> Any:
    """Records a call of `module` in the graph of torch.fx."""
    path = input.tracer.path_of_module(module)
    if not path:
        raise RuntimeError(
            f"{module.int8_name}: torch.fx cannot trace into an int8 layer, only record a call of it. Trace a model that "
            "contains the layer, such as nn.Sequential(layer)."
        )
    return input.tracer.create_proxy("call_module", path, (input,), options)


def refuse_transforms(name: str, *tensors: Tensor) -> None:
    """Raises an error if a transform that is not supported runs the forward of an int8 layer."""
    if torch.compiler.is_compiling():
        return
    if torch._C._is_tracing():
        raise RuntimeError(
            f"{name}: torch.jit.trace cannot record an int8 layer, because its scales depend on the data; trace the float "
            "model (byteback.restore(copy.deepcopy(model))), or export the int8 model with torch.export."
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            f"{name}: int8 layers do not support torch.func transforms (grad, vmap, jvp, ...), because they round and have "
            f"state; use loss.backward() for gradients. {_IN_FLOAT}."
        )
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError(
            f"{name}: int8 layers do not support forward-mode AD, because a rounded product has no derivative. {_IN_FLOAT}."
        )


def refuse_script(name: str) -> None:
    """Raises the error of torch.jit.script."""
    raise RuntimeError(
        f"{name}: torch.jit.script cannot compile a layer of a prepared model; script the float model "
        "(byteback.restore(copy.deepcopy(model))), or export the int8 model with torch.export."
    )
