# SPDX-License-Identifier: Apache-2.0
"""Quantizes the operands of the products of a layer: its input, its weight and the gradient of its output.

    input      with the clip of the batch in training; the output of a fused block may be int8 already
    weight     again in every forward pass, unless the layer is frozen
    gradient   one copy for both products, or two that share their noise; the gradient of a fused block (`BlockGradient`) is
               computed while it is quantized

Each is one operation of a backend (ops/quantizer.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from byteback.nn.fused.sources import materialize, shared_floats, source_of
from byteback.quantize import Gradient, Moment, QTensor, quantize_fresh, quantize_pair

if TYPE_CHECKING:
    from byteback.nn.layers.layer import Int8Layer

RECOMPUTED = -1
"""The call slot of a forward that activation checkpointing recomputes during backward."""


def quantize_input(layer: Int8Layer, x: Tensor, slot: int, for_grad_weight: bool) -> QTensor:
    """Returns the input as int8. The clip is that of the batch in training, and the tracked clip in eval.

    In eval the scale is per sample, unless grad_weight will sum over N. The output of a fused block may be int8 already, or is
    computed as int8 without a float tensor.
    """
    numerics: Any = layer._modules["quantizers"]  # faster than nn.Module.__getattr__
    quantizer, buffers = numerics._modules["input"], numerics._buffers
    settings, iteration, nonfinite = numerics.handles["input"], buffers["iteration"], buffers["nonfinite"]
    source = source_of(x) if numerics.shares_input else None
    own_clip = layer.training or layer.recipe.eval_clip == "batch"
    if source is None and own_clip:
        source = shared_floats(x, numerics.settings["input"].rule)
    moment = Moment(iteration, max(slot, 0), layer.training and slot != RECOMPUTED)
    if source is not None:
        tracked = None if own_clip else _tracked_clip(layer, max(slot, 0))
        if own_clip or tracked is not None:
            clip, x_q = source.int8(tracked)
            adopted: QTensor = quantizer.adopt(x_q, clip, lambda: materialize(x), settings, moment, nonfinite)
            return adopted
    x = materialize(x)
    if own_clip:
        made: QTensor = quantizer.quantize(x, settings, moment, nonfinite)
        return made
    predicted: QTensor = quantizer.quantize_tracked(
        x, settings, iteration, max(slot, 0), not for_grad_weight, layer.int8_shared.is_counting()
    )
    return predicted


def _tracked_clip(layer: Int8Layer, slot: int) -> Tensor | None:
    """The clip that training has tracked for this call, if it is known; a frozen layer keeps it."""
    counting, frozen = layer.int8_shared.is_counting(), layer.int8_frozen
    if frozen is None or torch.compiler.is_compiling():
        return layer.quantizers.input.tracked_clip(slot, counting)
    return frozen.tracked_clip(layer, slot, counting)


def known_clip(layer: Int8Layer, slot: int) -> Tensor | None:
    """Returns the clip of the input of a frozen layer; None if it follows from the input, or if a block would not use it."""
    if layer.training or layer.recipe.eval_clip == "batch" or not layer.quantizers.shares_input:
        return None
    return _tracked_clip(layer, max(slot, 0))


def weight_as_int8(layer: Int8Layer, weight: Tensor) -> QTensor:
    """Returns the weight as int8. A frozen layer returns its stored copy."""
    if layer.int8_frozen is None or torch.compiler.is_compiling():
        return fresh_weight(layer, weight)
    return layer.int8_frozen.weight(layer, weight)


def fresh_weight(layer: Int8Layer, weight: Tensor) -> QTensor:
    """Quantizes the weight."""
    numerics = layer.quantizers
    return quantize_fresh(weight, numerics.handles["weight"], numerics.iteration, numerics.unshared if layer.training else None)


def makes_pairs(layer: Int8Layer) -> bool:
    """Whether the backward pass of a layer may choose the clips of two copies of its gradient together."""
    return "quantizers" in layer._modules and layer.quantizers.chooses_both


Begun = tuple[Moment, Tensor]
"""When a gradient is quantized, and the key of its noise."""


def _begin_gradient(layer: Int8Layer, slot: int, training: bool) -> Begun:
    """Counts a gradient of the layer. Returns its moment and noise key."""
    numerics = layer.quantizers
    if not torch.compiler.is_compiling():
        layer.watch_for_hook()
    counts_itself = training and not layer.hooked
    # Both copies must use the same iteration, also if this backward pass increments it.
    moment = Moment(numerics.iteration.clone() if counts_itself else numerics.iteration, layer.backward_slot(slot), training)
    return moment, numerics.next_noise_key(layer.rank(), count_iteration=counts_itself)


def quantize_gradient(
    layer: Int8Layer,
    gradient: Gradient,
    slot: int,
    training: bool,
    for_input: bool,
    for_weight: bool,
    begun: Begun | None = None,
) -> tuple[QTensor | None, QTensor | None]:
    """Returns grad_output as int8 for grad_input and for grad_weight: one copy for both, or two that share their noise.

    If no product sums over K, both use the copy for grad_weight. `begun` is given if this gradient was counted already.
    """
    if not for_input and not for_weight:
        return None, None
    if "quantizers" not in layer._modules:
        raise RuntimeError(
            "backward: this layer was restored to float between forward and backward, so its int8 gradient cannot be "
            "computed. Call byteback.restore(model) after backward."
        )
    numerics = layer.quantizers
    moment, key = begun or _begin_gradient(layer, slot, training)
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
