# SPDX-License-Identifier: Apache-2.0
"""The training step of a block on a backend that runs each direction in one call (ops/block_step.py).

The conditions are those of ordinary training: all three products are int8, the batch norm has its parameters, and the int8
input exists. In all other cases, and in the steps that search clips or measure directions (about every tenth), the operators
run one by one (block.py). Both cases save the same tensors for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.nn.fused.shared_gradients import Waiting
from byteback.nn.fused.sources import SHARED_RULE, floats_dtype, floats_of, shared_floats, source_of
from byteback.ops.backends.registry import backend_of
from byteback.ops.block_step import BlockShape, PredictionShape, block_prediction, block_site
from byteback.ops.types import NormGradient, Residual, Wants
from byteback.quantize import Moment, QTensor

_profiling = torch._C._autograd._profiler_enabled
_MOST_SITES = 256  # per layer, so that images of many sizes do not fill the memory

enabled = True
"""If False, the operators always run one by one. Tests compare the two."""


def find_site(x: Tensor, weight: Tensor, stages: Any, wants: Any, needs: tuple[bool, ...]) -> Any:
    """Returns the site of this call; None if it is not ordinary training. `wants(...)` returns what the block computes."""
    call, norm = stages.call, stages.norm
    layer = call.layer
    numerics = layer._modules.get("quantizers")
    if numerics is None or call.slot < 0 or call.bias is not None or not layer.training or not layer.runs_int8() or not enabled:
        return None
    if _profiling():  # a profiler should see the operators
        return None
    if norm.gamma is None or norm.beta is None or norm.running is None or layer.int8_frozen is not None:
        return None
    adds, backend = None if stages.residual is None else floats_dtype(stages.residual), backend_of(x)
    key = (x.shape, weight.shape, weight.stride(), backend, call.slot, stages.activation, adds, needs, norm.eps)
    return kept(layer, key, lambda: _new_site(x, weight, stages, wants(stages, True, needs[3]), needs))


def kept(layer: Any, key: tuple[Any, ...], new: Callable[[], Any]) -> Any:
    sites: dict[Any, Any] = layer.__dict__.setdefault("int8_sites", {})  # missing in a layer of an earlier version's pickle
    if key not in sites:
        if len(sites) >= _MOST_SITES:
            sites.clear()
        sites[key] = new()
    return sites[key]


def _new_site(x: Tensor, weight: Tensor, stages: Any, wants: Wants, needs: tuple[bool, ...]) -> Any:
    call, norm = stages.call, stages.norm
    layer, numerics = call.layer, call.layer.quantizers
    recipe, settings = layer.recipe, numerics.settings
    in_int8 = recipe.output and recipe.grad_input and recipe.grad_weight
    if not in_int8 or not (needs[0] and needs[1] and needs[3] and needs[4]):
        return None
    if settings["input"].rule != SHARED_RULE or settings["weight"].rule != SHARED_RULE:
        return None
    if stages.residual is not None and recipe.residual_memory == "int8":
        return None
    names = ["input", "grad_output"]
    if numerics.grad_output_for_weight is not None:
        if not numerics.chooses_both:
            return None
        names.append("grad_output_for_weight")
    residual = None if stages.residual is None else floats_dtype(stages.residual)
    sizes = tuple(x.shape), tuple(weight.shape), weight.stride(), tuple(call.size)
    shape = BlockShape(*sizes, tuple(call.products), stages.activation, residual, wants, norm.eps)
    chosen = tuple(settings[name] for name in names)
    return block_site(x, shape, chosen, not layer.shares_gradient(), call.slot)


def find_plan(call: Any, w: QTensor, added: Residual, activation: str) -> Any:
    """Returns the plan of a block in predictions (ops/block_step.py: block_prediction), made once; None if there is none."""
    if not enabled:
        return None
    x, size, products = call.x, call.size, call.products
    key = x.shape, w.values.stride(), products, activation, added is not None, backend_of(w.values)
    shape = tuple(x.shape), tuple(w.values.shape), w.values.stride(), tuple(size), tuple(products), activation
    return kept(call.layer, key, lambda: block_prediction(w.values, PredictionShape(*shape, added is not None)))


def forward_step(
    site: Any, x: Tensor, weight: Tensor, residual: Tensor | None, stages: Any
) -> tuple[QTensor, Tensor | None, list[Any]] | None:
    """Returns the int8 copy of the input, the residual as it was added, and the results of the site; None if it cannot run."""
    source = source_of(x)
    if source is None:
        source = shared_floats(x, SHARED_RULE)
        if source is None:
            return None
    (clip, q), norm = source.int8(), stages.norm
    added = None if residual is None else floats_of(residual)
    numerics = stages.call.layer.quantizers
    quantizer = numerics._modules["input"]._buffers
    tensors = (weight, norm.gamma, norm.beta, *norm.running, numerics._buffers["iteration"], *quantizer.values())
    made = site.forward(q, clip, added, tensors, norm.momentum)
    return None if made is None else (q, added, made)


class Gradients(NamedTuple):
    """The gradient of the norm and those of the products. If the products are not computed yet, `begun` has the moment and the
    noise key with which the gradient of the convolution's output must be quantized for them."""

    norm: NormGradient
    products: tuple[Tensor | None, Tensor | None] | None
    waiting: Waiting | None  # what is still to be added to grad_input
    begun: tuple[Moment, Tensor] | None


def backward_step(ctx: Any, saved: tuple[Tensor, ...], g: Tensor, masks: bool, waiting: Waiting | None) -> Gradients | None:
    """Returns the gradients of a block whose forward ran on a site. Returns None and changes nothing if it cannot run.

    `masks`: the masked gradient is written. `waiting` is added to grad_input.
    """
    layer = ctx.layer
    numerics = layer._modules.get("quantizers")
    if numerics is None or type(g) is not Tensor or torch._C._len_torch_dispatch_stack() or layer.int8_frozen is not None:
        return None
    if backend_of(g) is not ctx.backend:
        return None
    if not numerics.stepped:
        layer.watch_for_hook()
    own, modules = numerics._buffers, numerics._modules
    tensors = [own["seed"], own["layer"], own["count"], own["iteration"], *modules["grad_output"]._buffers.values()]
    second = modules.get("grad_output_for_weight")
    if second is not None:
        tensors += second._buffers.values()
    counts_itself = ctx.training and not layer.hooked
    fits = waiting is not None and ctx.site.can_add(*waiting)
    rounds = ctx.rounds and (fits or waiting is None)
    added = waiting if fits else None
    made = ctx.site.backward(g, saved, ctx.saved_at, tensors, added, rounds, masks, layer.rank(), counts_itself)
    if made is None:
        return None
    done, now, words, (q, r, gamma, beta, masked, total, squares, grad_input, grad_weight) = made
    norm = NormGradient(q, r, gamma, beta, masked, None if total is None else (total, squares))
    if done:
        return Gradients(norm, (grad_input, grad_weight), None if fits else waiting, None)
    moment = Moment(torch.tensor(now, device=g.device), ctx.slot, ctx.training)
    return Gradients(norm, None, waiting, (moment, torch.tensor(words, device=g.device)))
