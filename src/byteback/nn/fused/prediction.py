# SPDX-License-Identifier: Apache-2.0
"""A block without gradient, with given statistics. Nothing, not even an int8 product, is computed until it is read.

In a frozen layer nearly all of a call is the same in every prediction: the int8 weight, the coefficients of the norm, the clip
of the input, and the plan that is made of them. `Known` is kept by the layer (nn/layers/weights.py), and valid as long as the
tensors that it was made of have neither moved nor changed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback import ops
from byteback.nn.autograd import output_operands
from byteback.nn.fused import step
from byteback.nn.fused.norm import given_coefficients, residual_of
from byteback.nn.fused.sources import (
    FloatPrediction,
    LazyActivation,
    OutputSpec,
    Poolable,
    PredictionSource,
    Source,
    channels_last,
    materialize,
    source_of,
)
from byteback.nn.layers.weights import mark_of, norm_as_given
from byteback.nn.quantizing import known_clip
from byteback.nn.watching import saw_input, saw_residual
from byteback.ops.backends.registry import backend_of
from byteback.quantize import QTensor

_inference = torch.is_inference_mode_enabled


class Known(NamedTuple):
    """What a call of a frozen layer is made of."""

    mark: Any
    alive: list[Tensor]  # keeps the memory of the mark allocated
    products: Any
    clip: Tensor  # of the input
    w: QTensor
    a: Tensor
    b: Tensor
    plan: Any
    spec: OutputSpec


def predicts(stages: Any) -> bool:
    """Whether nothing is learnt or remembered of this call, if no gradient is asked for."""
    layer = stages.call.layer
    return not (layer.training or stages.by_batch) and layer.runs_int8("output")


def predicts_in_float(stages: Any) -> bool:
    """Same for a block whose product is float."""
    layer = stages.call.layer
    return not (layer.training or stages.by_batch or layer.runs_int8("output"))


def predict(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, stages: Any, sources: list[Source]
) -> Tensor:
    """Returns the result of a block, and adds its source to `sources`."""
    call, block = stages.call, stages.call.block
    added = residual_of(residual, call.layer)
    saw_residual(call.layer, added)
    source = None if call.layer.int8_frozen is None else _of_frozen(x, weight, bias, added, stages)
    if source is None:
        operands = output_operands(x, weight, call.layer, call.slot)
        made = _made(operands[1], norm_as_given(call.layer, stages.norm, bias, weight), added, stages)
        source = PredictionSource(operands, call.products, *made[:2], added, stages.activation, made[3], made[2])
    return _result(source, block, sources)


def predict_in_float(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, stages: Any, sources: list[Source]
) -> Tensor:
    """Same for a block whose product is float. The product is computed now, the rest when it is read."""
    call = stages.call
    added = residual_of(residual, call.layer)
    saw_residual(call.layer, added)
    a, b = given_coefficients(stages.norm, bias, weight)
    y = channels_last(call.products.float_output(materialize(x), weight))
    source = FloatPrediction(y, a, b, added, stages.activation, call.strides)
    source.floats = reads_floats(call)
    return _result(source, call.block, sources)


def _result(source: Source, block: Any, sources: list[Source]) -> Tensor:
    source.join_floats = block.join_feeds_other
    sources.append(source)
    if block.feeds_other and not block.feeds_conv and not _inference():
        return source.give()
    return (Poolable if block.feeds_pool else LazyActivation)(source)


def reads_floats(call: Any) -> bool:
    """Whether a reader other than a convolution needs the result as floats."""
    block = call.block
    return block.feeds_other or block.feeds_pool or (block.feeds_add and call.layer.recipe.residual_memory == "float32")


def _made(w: QTensor, norm: tuple[Tensor, Tensor], added: ops.Residual, stages: Any) -> tuple[Tensor, Tensor, Any, OutputSpec]:
    """Returns the coefficients, the plan, and the form of the result."""
    call = stages.call
    spec = OutputSpec(call.size, call.strides, reads_floats(call))
    return *norm, step.find_plan(call, w, added, stages.activation), spec


def _of_frozen(x: Tensor, weight: Tensor, bias: Tensor | None, added: ops.Residual, stages: Any) -> PredictionSource | None:
    """Returns the source of a block of a frozen layer from what is known of it; None if its input is no output of a block."""
    call, norm = stages.call, stages.norm
    layer, source = call.layer, source_of(x)
    if source is None or not step.enabled or type(added) not in (Tensor, type(None)):
        return None
    given = [weight] if bias is None else [weight, bias]
    if norm is not None:
        given += [vector for vector in (norm.gamma, norm.beta, *norm.running) if vector is not None]
    counting, eps = layer.int8_shared.is_counting(), None if norm is None else norm.eps
    key = call.slot, counting, call.x.shape, call.strides, stages.activation, added is None, eps, backend_of(x)
    calls, mark = layer.int8_frozen.calls, mark_of(given)
    known: Known | None = calls.get(key)
    if known is None or known.mark != mark or known.products is not call.products:
        known = _learnt(mark, given, added, stages)
        if known is None:
            return None
        calls.keep(key, known)
    _, x_q = source.int8(known.clip)
    if not known.plan.can_read(x_q):
        return None
    saw_input(layer, call.slot, x_q.values)
    operands = x_q, known.w
    return PredictionSource(operands, call.products, known.a, known.b, added, stages.activation, known.spec, known.plan)


def _learnt(mark: Any, given: list[Tensor], added: ops.Residual, stages: Any) -> Known | None:
    """Returns what is the same in each prediction; None if the weight or the clip is not, or without a plan."""
    call = stages.call
    layer, weight = call.layer, given[0]
    clip = known_clip(layer, call.slot)
    if clip is None or layer._parameters.get("weight") is not weight:
        return None
    w = layer.int8_frozen.weight(layer, weight)
    a, b, plan, spec = _made(w, norm_as_given(layer, stages.norm, call.bias, weight), added, stages)
    if plan is None:
        return None
    return Known(mark, [tensor.detach() for tensor in given], call.products, clip, w, a, b, plan.bound(w, a, b), spec)
