# SPDX-License-Identifier: Apache-2.0
"""The only place where the three products meet: one autograd function for every int8 layer.

                 forward                                             backward
  input  ─ quantize_input ─► x_q ─┐                 grad_output ─┬─ quantize_grad ────────────► g_q ─┐
                                  ├─ output ─► × scales          │                                   ├─ grad_input ─► × scales
  weight ─ quantize_weight ► w_q ─┘                              │                        saved w_q ─┘
                                                                 └─ quantize_grad_for_weight ─► g_q' ┐
                                                                                                     ├─ grad_weight ─► × scales
                                                                                          saved x_q ─┘

Saved for backward: the int8 tensors and their scales (for a product that the recipe keeps in float, its float operand).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from byteback.nn.products import Products
from byteback.quantize import QTensor, quantize_fresh

if TYPE_CHECKING:
    from byteback.nn.layer import Int8Layer

RECOMPUTED = -1
"""The call slot of a forward that activation checkpointing runs again during backward."""


class Int8Product(Function):
    """output = input ⋆ weight, with all three products in int8 unless the recipe says otherwise."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, layer: Int8Layer, products: Products, slot: int, with_grad: bool
    ) -> Tensor:
        recipe = layer.recipe
        # needs_input_grad stays true under no_grad, where no backward will come.
        for_input, for_weight = with_grad and ctx.needs_input_grad[0], with_grad and ctx.needs_input_grad[1]
        x_q = w_q = None
        if recipe.output or (for_weight and recipe.grad_weight):
            x_q = _quantize_input(layer, x, slot, for_weight and recipe.grad_weight)
        if recipe.output or (for_input and recipe.grad_input):
            w_q = quantize_fresh(weight, layer.quantizers.handles["weight"], layer.quantizers.iteration)
        if recipe.output:
            assert x_q is not None and w_q is not None
            output = products.output(x_q, w_q)
        else:
            output = products.float_output(x, weight)
        ctx.layer, ctx.products, ctx.slot, ctx.training = layer, products, slot, layer.training
        ctx.input_size, ctx.weight_size = list(x.shape), list(weight.shape)
        ctx.save_for_backward(
            *(x_q if x_q is not None and for_weight and recipe.grad_weight else (None, None)),
            *(w_q if w_q is not None and for_input and recipe.grad_input else (None, None)),
            x if for_weight and not recipe.grad_weight else None,
            weight if for_input and not recipe.grad_input else None,
        )
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = _gradients(ctx, grad_output)
        if torch.is_grad_enabled():
            # The anchor needs a gradient, which grad_output itself may not: that of a plain sum is a constant.
            anchor = torch.zeros((), device=grad_output.device, requires_grad=True)
            grads = _RefuseSecond.apply(ctx.layer.int8_name, anchor, *grads)
        return (*grads, None, None, None, None)


class _RefuseSecond(Function):
    """Makes the gradients differentiable in name, so that a second differentiation meets an error and not a silent zero."""

    @staticmethod
    def forward(ctx: Any, name: str, anchor: Tensor, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.name = name
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise RuntimeError(
            f"{ctx.name}: its gradient was differentiated a second time, but int8 gradients are rounded and have no "
            "derivative. Call backward without create_graph=True, or keep the layers that need it in float "
            "(prepare(..., keep_float=[...]) or byteback.enabled(model, False))."
        )


def _quantize_input(layer: Int8Layer, x: Tensor, slot: int, for_grad_weight: bool) -> QTensor:
    """Training: the batch's own clip. Eval: the tracked one, or per sample where no grad_weight will sum over N."""
    numerics = layer.quantizers
    settings = numerics.handles["input"]
    if layer.training or layer.recipe.eval_clip == "batch":
        remember = layer.training and slot != RECOMPUTED
        return numerics.input.quantize(
            x, settings, numerics.iteration, numerics.nonfinite, slot=max(slot, 0), remember=remember
        )
    return numerics.input.quantize_tracked(
        x, settings, numerics.iteration, max(slot, 0), not for_grad_weight, layer.int8_shared.is_counting()
    )


def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x_values, x_scale, w_values, w_scale, x_float, w_float = ctx.saved_tensors
    layer, products = ctx.layer, ctx.products
    if "quantizers" not in layer._modules:
        raise RuntimeError(
            "backward: this layer was restored to float between forward and backward, so its int8 gradient has nowhere to go. "
            "Call byteback.restore(model) after backward."
        )
    recipe = layer.recipe
    for_input, for_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
    g_q, g_q_for_weight = _quantize_gradient(
        layer,
        grad_output,
        layer.backward_slot(ctx.slot),
        ctx.training,
        for_input and recipe.grad_input,
        for_weight and recipe.grad_weight,
    )
    grad_input = grad_weight = None
    if g_q is not None:
        grad_input = products.grad_input(g_q, QTensor(w_values, w_scale), ctx.input_size)
    elif for_input:
        grad_input = products.float_grad_input(grad_output, w_float, ctx.input_size)
    if g_q_for_weight is not None:
        grad_weight = products.grad_weight(g_q_for_weight, QTensor(x_values, x_scale), ctx.weight_size)
    elif for_weight:
        grad_weight = products.float_grad_weight(grad_output, x_float, ctx.weight_size)
    return grad_input, grad_weight


def _quantize_gradient(
    layer: Int8Layer, grad_output: Tensor, slot: int, training: bool, for_input: bool, for_weight: bool
) -> tuple[QTensor | None, QTensor | None]:
    """grad_output for grad_input and for grad_weight: one copy for both, or two that share their noise."""
    if not for_input and not for_weight:
        return None, None
    numerics = layer.quantizers
    layer.watch_for_hook()
    iteration = numerics.iteration.clone()  # both copies see the same one, also where the backward pass counts it
    key = numerics.next_noise_key(layer.rank(), count_iteration=training and not layer.hooked)

    def quantize(field: str) -> QTensor:
        noise = key if numerics.settings[field].rule.rounding == "stochastic" else None
        quantizer = getattr(numerics, field)
        settings = numerics.handles[field]
        return quantizer.quantize(grad_output, settings, iteration, numerics.nonfinite, noise, slot, training)

    if numerics.grad_output_for_weight is None:
        shared = quantize("grad_output")
        return (shared if for_input else None), (shared if for_weight else None)
    return (
        quantize("grad_output") if for_input else None,
        quantize("grad_output_for_weight") if for_weight else None,
    )
