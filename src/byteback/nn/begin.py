# SPDX-License-Identifier: Apache-2.0
"""How a convolution begins a fused block: when it may, and the pending tensor that it returns.

`prepare` binds a block to a convolution (`int8_block`). At every call the convolution asks whether the block may be fused
now; where it may not (a hook wants to see a tensor in the middle, torch.compile traces, autocast changes dtypes, …) the layer
runs as it would without a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from byteback.nn.activation import Activation, Poolable
from byteback.nn.block import Call, run_block
from byteback.nn.pending import BlockPlan, Pending, Stages, modes
from byteback.nn.products import ConvProducts
from byteback.nn.transforms import in_forward_ad
from byteback.ops.contract import layout

_PLAIN = (Tensor, nn.Parameter, Activation, Poolable)


@dataclass(frozen=True)
class BoundBlock:
    """A plan and the modules that it would swallow; a hook on one of them means that somebody wants to look inside."""

    plan: BlockPlan
    swallowed: tuple[nn.Module, ...]


def may_fuse(layer: Any, x: Tensor) -> bool:
    """Whether this call can run as a block."""
    bound: BoundBlock | None = layer.int8_block
    if bound is None or torch.compiler.is_compiling() or torch._C._is_tracing() or type(x) not in _PLAIN:
        return False
    if x.dtype != torch.float32 or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    if in_forward_ad() or torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return not (_has_any_global_hook() or _is_hooked(layer) or any(map(_is_hooked, bound.swallowed)))


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def begin_block(layer: Any, x: Tensor, products: ConvProducts, slot: int) -> Tensor:
    """The output of `layer` as a tensor that waits for what follows."""
    weight, bias = layer.weight, layer.bias
    size, strides = _output_layout(x.shape, x.stride(), weight.shape, weight.stride(), products)
    call = Call(layer, weight, bias, products, slot, strides, size[2:])
    stages = Stages(partial(_run_unchanged, x, call, _versions(x, weight, bias)), layer.int8_block.plan, modes())
    pending = Pending(stages, size, strides, x.device)
    return pending.compute() if stages.plan.ends == "conv" else pending


def _versions(*tensors: Tensor | None) -> list[int]:
    """How often each was written to; inference tensors do not count."""
    return [0 if x is None or x.is_inference() else x._version for x in tensors]


def _run_unchanged(x: Tensor, call: Call, versions: list[int], stages: Stages) -> Tensor:
    """The block, unless its operands are no longer what they were at the call."""
    now = _versions(x, call.weight, call.bias)
    if now != versions:
        what = "input" if now[0] != versions[0] else "weight or bias"
        raise RuntimeError(
            f"{call.layer.int8_name}: its {what} was written to in place after the call and before the block that it begins "
            f"was computed, which the traced forward does not do, so the {what} it needs is gone. Write out of place, or "
            "prepare the model with fuse=False."
        )
    return run_block(x, call, stages)


@lru_cache(maxsize=4096)
def _output_layout(
    x: tuple[int, ...],
    x_strides: tuple[int, ...],
    weight: tuple[int, ...],
    weight_strides: tuple[int, ...],
    products: ConvProducts,
) -> tuple[torch.Size, tuple[int, ...]]:
    """Size and strides of the output, from those of the operands: what PyTorch would give."""
    axes = zip(x[2:], weight[2:], products.stride, products.padding, products.dilation, strict=True)
    spatial = [(size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for size, kernel, stride, pad, dilation in axes]
    size = [x[0], weight[0], *spatial]
    last = 0 not in x and (layout.lies_last(x, x_strides) or layout.lies_last(weight, weight_strides))
    return torch.Size(size), layout.dense_strides(size, last)
