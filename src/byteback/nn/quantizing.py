# SPDX-License-Identifier: Apache-2.0
"""How the operands of a layer's products become int8: its input, its weight and the gradient of its output.

    input      by the batch's own clip in training; the output of a fused block may have its integers already
    weight     anew in every forward pass, unless the layer is frozen
    gradient   one copy for both products, or two that share their noise; the gradient of a fused block (`BlockGradient`) is
               computed as it is quantized

Each is one operation of a backend (ops/quantizer.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from byteback.nn.fused.sources import SHARED_RULE, materialize, shared_floats, source_of
from byteback.quantize import Gradient, Moment, QTensor, quantize_fresh, quantize_pair

if TYPE_CHECKING:
    from byteback.nn.layers.layer import Int8Layer

RECOMPUTED = -1
"""The call slot of a forward that activation checkpointing runs again during backward."""


def quantize_input(layer: Int8Layer, x: Tensor, slot: int, for_grad_weight: bool) -> QTensor:
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
        tracked = None if own_clip else _tracked_clip(layer, max(slot, 0))
        if own_clip or tracked is not None:
            clip, x_q, counts = source.int8(tracked)
            return numerics.input.adopt(x_q, clip, counts, lambda: materialize(x), settings, moment, numerics.nonfinite)
    x = materialize(x)
    if own_clip:
        return numerics.input.quantize(x, settings, moment, numerics.nonfinite)
    return numerics.input.quantize_tracked(
        x, settings, numerics.iteration, max(slot, 0), not for_grad_weight, layer.int8_shared.is_counting()
    )


def _tracked_clip(layer: Int8Layer, slot: int) -> Tensor | None:
    """The clip that training has tracked for this call, if it is known; a frozen layer keeps it."""
    counting, frozen = layer.int8_shared.is_counting(), layer.int8_frozen
    if frozen is None or torch.compiler.is_compiling():
        return layer.quantizers.input.tracked_clip(slot, counting)
    return frozen.tracked_clip(layer, slot, counting)


def weight_as_int8(layer: Int8Layer, weight: Tensor) -> QTensor:
    """The weight as int8, as it is now; a frozen layer returns the copy that it keeps."""
    if layer.int8_frozen is None or torch.compiler.is_compiling():
        return fresh_weight(layer, weight)
    return layer.int8_frozen.weight(layer, weight)


def fresh_weight(layer: Int8Layer, weight: Tensor) -> QTensor:
    """The weight as int8, made now."""
    numerics = layer.quantizers
    return quantize_fresh(weight, numerics.handles["weight"], numerics.iteration, numerics.unshared if layer.training else None)


def makes_pairs(layer: Int8Layer) -> bool:
    """Whether a layer's backward pass may choose the clips of two copies of its gradient at once."""
    return "quantizers" in layer._modules and layer.quantizers.chooses_both


Begun = tuple[Moment, Tensor]
"""When a gradient is quantized, and the key of its noise."""


def _begin_gradient(layer: Int8Layer, slot: int, training: bool) -> Begun:
    """Counts one more gradient of the layer."""
    numerics = layer.quantizers
    if not torch.compiler.is_compiling():
        layer.watch_for_hook()
    counts_itself = training and not layer.hooked
    # Both copies see the same iteration, also where this backward pass counts it.
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
    """grad_output for grad_input and for grad_weight: one copy for both, or two that share their noise.

    Where no product sums over K, the copy that grad_weight wants is used by both. `begun`: this gradient is counted already.
    """
    if not for_input and not for_weight:
        return None, None
    if "quantizers" not in layer._modules:
        raise RuntimeError(
            "backward: this layer was restored to float between forward and backward, so its int8 gradient has nowhere to go. "
            "Call byteback.restore(model) after backward."
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
