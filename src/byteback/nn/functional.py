# SPDX-License-Identifier: Apache-2.0
"""The only place where the three products meet: one autograd function for every int8 layer.

                 forward                                             backward
  input  ─ quantize ───────► x_q ─┐                 grad_output ─┬─ quantize ─────────────────► g_q ─┐
                                  ├─ output ─► × scales          │                                   ├─ grad_input ─► × scales
  weight ─ quantize ───────► w_q ─┘                              │                        saved w_q ─┘
                                                                 └─ quantize, per channel ────► g_q' ┐
                                                                                                     ├─ grad_weight ─► × scales
                                                                                          saved x_q ─┘

Saved for backward: the int8 tensors and their scales (for a product that the recipe keeps in float, its float operand).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from byteback.nn.activation import SHARED_RULE, numbers, source_of
from byteback.nn.joined import shared_floats
from byteback.nn.products import Products
from byteback.nn.undo import current_step, undo_step
from byteback.nn.weights import refuse_training, weight_as_int8
from byteback.ops.contract import layout
from byteback.quantize import Gradient, Moment, NonFiniteError, QTensor, floats_of, quantize_pair

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
        # needs_input_grad stays true under no_grad, where no backward will come.
        for_input, for_weight = with_grad and ctx.needs_input_grad[0], with_grad and ctx.needs_input_grad[1]
        operands, kept = forward_operands(x, weight, layer, slot, for_input, for_weight)
        output = products.output(*operands) if operands is not None else products.float_output(numbers(x), weight)
        if source_of(x) is not None and not layout.is_channels_last(x) and not layout.is_channels_last(weight):
            output = output.contiguous()  # a block's integers lie channels last, whatever the model's memory format
        ctx.layer, ctx.products, ctx.slot, ctx.training = layer, products, slot, layer.training
        ctx.input_size, ctx.weight_size = list(x.shape), list(weight.shape)
        ctx.step = current_step()
        ctx.save_for_backward(*kept)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = backward_products(ctx, Operands(*ctx.saved_tensors), grad_output, ctx.needs_input_grad)
        return (*refuse_second(ctx.layer.int8_name, grad_output, grads), None, None, None, None)


class Operands(NamedTuple):
    """What a forward product keeps for the two backward ones: integers, or floats for a product that runs in float."""

    x_values: Tensor | None = None
    x_scale: Tensor | None = None
    w_values: Tensor | None = None
    w_scale: Tensor | None = None
    x: Tensor | None = None
    w: Tensor | None = None


def forward_operands(
    x: Tensor, weight: Tensor, layer: Int8Layer, slot: int, for_input: bool, for_weight: bool
) -> tuple[tuple[QTensor, QTensor] | None, Operands]:
    """What the output is the product of (None where it runs in float), and what its gradients will need."""
    int8_output, int8_input, int8_weight = (layer.runs_int8(product) for product in ("output", "grad_input", "grad_weight"))
    x_q = w_q = None
    if int8_output or (for_weight and int8_weight):
        x_q = _quantize_input(layer, x, slot, for_weight and int8_weight)
    if int8_output or (for_input and int8_input):
        w_q = weight_as_int8(layer, weight)
    operands = None
    if int8_output:
        assert x_q is not None and w_q is not None
        operands = x_q, w_q
    x_kept = x_q if x_q is not None and for_weight and int8_weight else (None, None)
    w_kept = w_q if w_q is not None and for_input and int8_input else (None, None)
    x_float = numbers(x) if for_weight and not int8_weight else None
    w_float = weight if for_input and not int8_input else None
    return operands, Operands(x_kept[0], x_kept[1], w_kept[0], w_kept[1], x_float, w_float)


def output_operands(x: Tensor, weight: Tensor, layer: Int8Layer, slot: int) -> tuple[QTensor, QTensor]:
    """What the output is the product of, where no gradient will be asked for."""
    x_q = _quantize_input(layer, x, slot, False)
    return x_q, weight_as_int8(layer, weight)


def backward_products(
    ctx: Any, kept: Operands, gradient: Gradient, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """grad_input and grad_weight. ctx has layer, products, slot, training, step, input_size and weight_size."""
    layer, products = ctx.layer, ctx.products
    for_input, for_weight = needs[0], needs[1]
    if for_weight:
        refuse_training(layer, "a gradient of its weight is asked for")
    int8_input, int8_weight = for_input and kept.w_values is not None, for_weight and kept.x_values is not None
    try:
        g_q, g_q_for_weight = _quantize_gradient(layer, gradient, ctx.slot, ctx.training, int8_input, int8_weight)
    except NonFiniteError:
        undo_step(ctx.step)
        raise
    grad_input = grad_weight = None
    if g_q is not None:
        assert kept.w_values is not None and kept.w_scale is not None
        grad_input = products.grad_input(g_q, QTensor(kept.w_values, kept.w_scale), ctx.input_size)
    elif for_input:
        grad_input = products.float_grad_input(floats_of(gradient), kept.w, ctx.input_size)
    if g_q_for_weight is not None:
        assert kept.x_values is not None and kept.x_scale is not None
        grad_weight = products.grad_weight(g_q_for_weight, QTensor(kept.x_values, kept.x_scale), ctx.weight_size)
    elif for_weight:
        grad_weight = products.float_grad_weight(floats_of(gradient), kept.x, ctx.weight_size)
    return grad_input, grad_weight


def refuse_second(name: str, grad_output: Tensor, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradients, made to refuse a second differentiation where one was prepared for."""
    if not torch.is_grad_enabled():
        return grads
    # The anchor needs a gradient, which grad_output itself may not: that of a plain sum is a constant. Both are in the graph,
    # so that a derivative by grad_output, which torch.autograd.functional.jvp asks for, meets the error too.
    anchor = torch.zeros((), device=grad_output.device, requires_grad=True)
    return _RefuseSecond.apply(name, anchor, grad_output, *grads)


class _RefuseSecond(Function):
    """Makes the gradients differentiable in name, so that a second differentiation meets an error and not a silent zero."""

    @staticmethod
    def forward(ctx: Any, name: str, anchor: Tensor, through: Tensor, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
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
    """Training: the batch's own clip. Eval: the tracked one, or per sample where no grad_weight will sum over N.

    The output of a fused block may have its integers already, or make them under a clip without ever being float.
    """
    numerics = layer.quantizers
    settings = numerics.handles["input"]
    source = source_of(x) if numerics.settings["input"].rule == SHARED_RULE else None
    own_clip = layer.training or layer.recipe.eval_clip == "batch"
    if source is None and own_clip:
        source = shared_floats(x, numerics.settings["input"].rule)
    moment = Moment(numerics.iteration, max(slot, 0), layer.training and slot != RECOMPUTED)
    if source is not None:
        tracked = None if own_clip else numerics.input.tracked_clip(max(slot, 0), layer.int8_shared.is_counting())
        if own_clip or tracked is not None:
            clip, x_q, counts = source.int8(tracked)
            return numerics.input.adopt(x_q, clip, counts, lambda: numbers(x), settings, moment, numerics.nonfinite)
    x = numbers(x)
    if own_clip:
        return numerics.input.quantize(x, settings, moment, numerics.nonfinite)
    return numerics.input.quantize_tracked(
        x, settings, numerics.iteration, max(slot, 0), not for_grad_weight, layer.int8_shared.is_counting()
    )


def _quantize_gradient(
    layer: Int8Layer, gradient: Gradient, slot: int, training: bool, for_input: bool, for_weight: bool
) -> tuple[QTensor | None, QTensor | None]:
    """grad_output for grad_input and for grad_weight: one copy for both, or two that share their noise.

    Where no product sums over K, the copy that grad_weight wants is used by both.
    """
    if not for_input and not for_weight:
        return None, None
    if "quantizers" not in layer._modules:
        raise RuntimeError(
            "backward: this layer was restored to float between forward and backward, so its int8 gradient has nowhere to go. "
            "Call byteback.restore(model) after backward."
        )
    numerics = layer.quantizers
    if not torch.compiler.is_compiling():
        layer.watch_for_hook()
    counts_itself = training and not layer.hooked
    # Both copies see the same iteration, also where this backward pass counts it.
    moment = Moment(numerics.iteration.clone() if counts_itself else numerics.iteration, layer.backward_slot(slot), training)
    key = numerics.next_noise_key(layer.rank(), count_iteration=counts_itself)
    second = numerics.grad_output_for_weight
    shares = second is not None and layer.shares_gradient()
    if second is not None and numerics.chooses_both and (shares or (for_input and for_weight)):
        handles = numerics.handles["grad_output"], numerics.handles["grad_output_for_weight"]
        both = None
        if not torch.compiler.is_compiling():
            noise = numerics.noise_of("grad_output", key)
            pair = numerics.grad_output, second
            both = quantize_pair(pair, gradient, handles, moment, numerics.nonfinite, noise, want_first=not shares)
        if both is not None:
            first, each = both
            return (each if shares else first) if for_input else None, each if for_weight else None

    def quantize(role: str) -> QTensor:
        noise = numerics.noise_of(role, key)
        return getattr(numerics, role).quantize(gradient, numerics.handles[role], moment, numerics.nonfinite, noise)

    if second is None or shares:
        shared = quantize("grad_output_for_weight" if shares else "grad_output")
        return (shared if for_input else None), (shared if for_weight else None)
    return (
        quantize("grad_output") if for_input else None,
        quantize("grad_output_for_weight") if for_weight else None,
    )
