# SPDX-License-Identifier: Apache-2.0
"""The fused block: conv → norm → (residual add) → activation as one autograd function, with int8 on both ends.

    forward    x_q ⋆ w_q ─► y ─ channel statistics ─► a, b ─► act(a·y + b (+ r)) ─► int8 and/or float       (one pass)
    backward   g ─ sums per channel ─► p, q, r ─► p·g' + q·y + r ─► int8                                    (two passes)
               then grad_input and grad_weight as in functional.py; g' is g through the activation's derivative

ops/norm.py has the formulas. The float gradient of y is written out only where a clip rule has to look at it: a clip
that is held for a period needs no look, and magnitude-aware clips compute the gradient as they read (a third pass).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from byteback import ops
from byteback.nn.activation import SHARED_RULE, Activation, Joins, Poolable, Source, carry, numbers
from byteback.nn.functional import Operands, backward_products, forward_operands, output_operands, refuse_second
from byteback.nn.inference import Deferred, Shown, can_defer
from byteback.nn.normalization import InputGradient, Normalized, folded, input_gradient, of_batch
from byteback.nn.numerics import makes_pairs
from byteback.nn.pending import BlockPlan, Stages
from byteback.nn.products import ConvProducts
from byteback.nn.residual import channels_last, residual_of
from byteback.nn.undo import current_step
from byteback.nn.weights import norm_as_given
from byteback.ops.activations import MONOTONE
from byteback.quantize import BlockGradient, QTensor

if TYPE_CHECKING:
    from byteback.nn.layer import Int8Layer


class Call(NamedTuple):
    """One call of a convolution that begins a block."""

    layer: Int8Layer
    weight: Tensor  # that of the call: by the time the block is computed the layer may have another (functional_call)
    bias: Tensor | None
    products: ConvProducts
    slot: int
    strides: tuple[int, ...]  # of the float result, as PyTorch would lay it out
    spatial: tuple[int, ...]  # its size without N and C


def run_block(x: Tensor, call: Call, stages: Stages) -> Tensor:
    """Computes a block as far as its stages are known."""
    norm = stages.norm
    gamma, beta = (norm.weight, norm.bias) if norm is not None else (None, None)
    sources: list[Source] = []
    with_grad = torch.is_grad_enabled()
    output = Block.apply(x, call.weight, call.bias, gamma, beta, stages.residual, call, stages, with_grad, sources)
    return output if isinstance(output, Activation) else carry(output, sources[0])


class Block(Function):
    """output = act(norm(x ⋆ weight + bias) + residual)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        residual: Tensor | None,
        call: Call,
        stages: Stages,
        with_grad: bool,
        sources: list[Source],
    ) -> Tensor:
        layer, norm, activation = call.layer, stages.norm, stages.activation
        if can_defer(layer, norm, with_grad and any(ctx.needs_input_grad[:6])):
            return _deferred(x, weight, bias, residual, call, stages, sources)
        for_input, for_weight = with_grad and ctx.needs_input_grad[0], with_grad and ctx.needs_input_grad[1]
        operands, kept = forward_operands(x, weight, layer, call.slot, for_input, for_weight)
        training = None if norm is None else norm.training
        added = residual_of(residual, layer)
        backs = with_grad and any(ctx.needs_input_grad[:6])
        saves = _what_to_save(ctx, stages, layer, residual is not None) if backs else _Saves(False, False, None)
        want = _wanted(stages.plan, layer)
        kept_y: Any = None
        if norm is not None and training:
            product = operands or channels_last(call.products.float_output(numbers(x), weight))
            source, normalized, made = _at_once(product, of_batch(norm, bias), added, call, stages, want, saves)
            mask, kept_y = made.mask, made.kept
        else:
            y = call.products.output(*operands) if operands else call.products.float_output(numbers(x), weight)
            normalized = folded(norm, bias, weight)
            source = Source(channels_last(y), normalized.a, normalized.b, added, activation, call.strides)
            mask = _write(source, want, saves.mask)
        if saves.y and kept_y is None:
            kept_y = source.x
        source.joins = want.joins
        if backs:
            ctx.layer, ctx.products, ctx.slot, ctx.training = layer, call.products, call.slot, layer.training
            ctx.name = layer.int8_name  # a layer that is restored before its backward pass has lost it
            ctx.norm_training, ctx.activation, ctx.step = training, activation, current_step()
            ctx.norm_eps = 0.0 if norm is None else norm.eps
            ctx.input_size, ctx.weight_size = list(x.shape), list(weight.shape)
            ctx.save_for_backward(*kept, mask, *normalized, *_tensors(kept_y))
        sources.append(source)
        # An inference tensor does not count its writes, so it could not tell whether its int8 copy is still true.
        if source.output is None or not stages.plan.feeds_other or torch.is_inference_mode_enabled():
            return (Poolable if stages.plan.feeds_pool else Activation)(source)
        output, source.output = source.output, None  # a source that holds the tensor which holds it would never die
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = _gradients(ctx, grad_output)
        return (*refuse_second(ctx.name, grad_output, grads), None, None, None, None)


def _deferred(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    call: Call,
    stages: Stages,
    sources: list[Source],
) -> Tensor:
    """The block of a prediction: not even its product is computed before its reader says what it wants."""
    layer, plan = call.layer, stages.plan
    operands = output_operands(x, weight, layer, call.slot)
    a, b = norm_as_given(layer, stages.norm, bias, weight)
    added = residual_of(residual, layer)
    needs_floats = plan.feeds_other or plan.feeds_pool
    size = (x.shape[0], weight.shape[0], *call.spatial)
    shown = Shown(torch.Size(size), call.strides, needs_floats)
    source = Deferred(operands, call.products, a, b, added, stages.activation, shown)
    source.joins = Joins(False, plan.join_feeds_other)
    sources.append(source)
    if plan.feeds_other and not plan.feeds_conv and not torch.is_inference_mode_enabled():
        return source.give()
    return (Poolable if plan.feeds_pool else Activation)(source)


class _Saves(NamedTuple):
    """What backward will need besides the operands: the product's output y (as what), the activation's mask."""

    y: bool
    mask: bool
    keep: str | None


def _what_to_save(ctx: Any, stages: Stages, layer: Any, adds: bool) -> _Saves:
    """y for the norm's gradient and for smooth activations; else a mask tells all that backward wants to know of it."""
    batch = stages.norm is not None and stages.norm.training
    y = batch or ctx.needs_input_grad[3] or stages.activation not in MONOTONE
    small = layer.recipe.norm_memory if batch and layer.recipe.norm_memory != "float32" else None
    masks = stages.activation in ("relu", "relu6")
    return _Saves(y, masks and (adds or not y or small is not None), small)


class _Wanted(NamedTuple):
    """What the plan expects to be read."""

    int8: bool
    floats: bool
    joins: Joins


def _wanted(plan: BlockPlan, layer: Any) -> _Wanted:
    # Training quantizes by the batch's own maximum, which is known now; eval waits for the clip of who reads it.
    own_clip = layer.training and layer.recipe.input == SHARED_RULE
    int8 = (plan.feeds_conv or (plan.feeds_add and layer.recipe.residual_memory == "int8")) and own_clip
    return _Wanted(int8, plan.feeds_other or plan.feeds_pool, Joins(plan.join_feeds_conv and own_clip, plan.join_feeds_other))


def _at_once(
    product: Tensor | tuple[QTensor, QTensor],
    norm: ops.BatchNorm,
    added: ops.Residual,
    call: Call,
    stages: Stages,
    want: _Wanted,
    saves: _Saves,
) -> tuple[Source, Normalized, ops.Normalized]:
    """The norm by the batch's statistics and the pass that writes what is wanted: the block's source, its norm, the pass.

    `product` is the convolution's output, or what it is the product of.
    """
    wants: dict[str, Any] = {"want_int8": want.int8, "want_float": want.floats, "want_mask": saves.mask, "keep": saves.keep}
    if isinstance(product, Tensor):
        y, batch = product, ops.normalize_batch(product, norm, added, stages.activation, **wants)
    else:
        y, batch = call.products.normalized_output(*product, norm, added, stages.activation, **wants)
    a, b, mean, invstd, peak, made = batch
    source = Source(y, a, b, added, stages.activation, call.strides, peak)
    source.keep(peak, made)
    return source, Normalized(a, b, mean, invstd), made


def _write(source: Source, want: _Wanted, masks: bool) -> Tensor | None:
    """Writes in one pass what the plan expects to be read, and the mask that backward needs."""
    if not (masks or want.floats or want.int8):
        return None
    return source.write(source.clip() if want.int8 else None, want.floats, masks)


def _tensors(kept: Any) -> tuple[Tensor, ...]:
    """What stands for y, as tensors that autograd can save."""
    return () if kept is None else (kept,) if isinstance(kept, Tensor) else tuple(kept)


def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: unpacking may recompute them
    kept, mask, normalized, y = Operands(*saved[:6]), saved[6], Normalized(*saved[7:11]), saved[11:]
    activation = ctx.activation
    for_residual = ctx.needs_input_grad[5]
    g = channels_last(grad_output)
    # Without y nothing is asked of it: its factors are 0, and any tensor may stand in its place.
    y = y if len(y) > 1 else y[0] if y else g
    masks, pairs = activation != "none", makes_pairs(ctx.layer)
    # Two copies read the gradient twice more: then a smooth activation's derivative is better taken once.
    want_masked = (for_residual and masks) or (pairs and activation in ops.SMOOTH)
    total = dot = masked = grads = sums = None
    a, b, mean, invstd = normalized
    if ctx.norm_training:
        q, r, gamma, beta, masked, sums = ops.normalize_grad_batch(
            g, y, a, b, mask, activation, mean, invstd, ctx.norm_eps, want_masked=want_masked, want_sums=pairs
        )
        # The batch's mean takes the bias out again.
        grads = InputGradient(a, q, r, gamma, beta, torch.zeros_like(a) if ctx.needs_input_grad[2] else None)
    elif any(ctx.needs_input_grad[2:5]) or want_masked or pairs:
        seen = ops.normalize_grad_sums(g, y, a, b, mask, activation, want_masked=want_masked, want_squares=pairs)
        total, dot, masked = seen.total, seen.dot, seen.masked
        if seen.squares is not None:
            sums = a * seen.total, a.double() * a * seen.squares
    if masked is not None:
        g, mask, activation = masked, None, "none"
    residual_grad = g if for_residual else None
    if grads is None:
        grads = input_gradient(normalized, ctx.norm_training, total, dot)
    parts = ops.GradientParts(g, y, a, b, mask, activation, grads.p, grads.q, grads.r)
    gradient = BlockGradient(parts, sums)
    grad_input, grad_weight = backward_products(ctx, kept, gradient, ctx.needs_input_grad)
    wanted = zip((grads.bias, grads.gamma, grads.beta, residual_grad), ctx.needs_input_grad[2:6], strict=True)
    return grad_input, grad_weight, *(grad if needed else None for grad, needed in wanted)
