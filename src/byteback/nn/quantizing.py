# SPDX-License-Identifier: Apache-2.0
"""How the operands of a layer's products become int8: its input, its weight and the gradient of its output.

input      by the batch's own clip in training; the output of a fused block may have its integers already
weight     anew in every forward pass, unless the layer is frozen
gradient   one copy for both products, or two that share their noise; a fused block's gradient (`BlockGradient`) is
           computed as it is quantized, any other (`FloatGradient`) exists as floats
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from byteback import ops
from byteback.nn.fused.sources import SHARED_RULE, shared_floats, source_of
from byteback.nn.fused.sources import materialize as numbers
from byteback.ops import magnitude
from byteback.quantize import (
    Adopted,
    LazyGradient,
    PairedGradient,
    QTensor,
    Step,
    adopt,
    quantize_both,
    quantize_fresh,
    quantize_held,
)

if TYPE_CHECKING:
    from byteback.nn.layers.layer import Int8Layer

RECOMPUTED = -1
"""The call slot of a forward that activation checkpointing runs again during backward."""


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
    if source is not None:
        tracked = None if own_clip else numerics.input.tracked_clip(max(slot, 0), layer.int8_shared.is_counting())
        if own_clip or tracked is not None:
            clip, x_q, counts = source.int8(tracked)
            remember = layer.training and slot != RECOMPUTED
            adopted = Adopted(x_q, clip, counts, lambda: numbers(x))
            step = Step(numerics.iteration, numerics.nonfinite, max(slot, 0), remember)
            return adopt(numerics.input, adopted, settings, step)
    x = numbers(x)
    if own_clip:
        remember = layer.training and slot != RECOMPUTED
        return numerics.input.quantize(
            x, settings, numerics.iteration, numerics.nonfinite, slot=max(slot, 0), remember=remember
        )
    return numerics.input.quantize_tracked(
        x, settings, numerics.iteration, max(slot, 0), not for_grad_weight, layer.int8_shared.is_counting()
    )


def weight_as_int8(layer: Int8Layer, weight: Tensor) -> QTensor:
    """The weight as int8, as it is now; a frozen layer returns the copy that it keeps."""
    if layer.int8_frozen is None or torch.compiler.is_compiling():
        return fresh_weight(layer, weight)
    return layer.int8_frozen.weight(layer, weight)


def fresh_weight(layer: Int8Layer, weight: Tensor) -> QTensor:
    """The weight as int8, made now."""
    return quantize_fresh(weight, layer.quantizers.handles["weight"], layer.quantizers.iteration)


# ---- gradients -------------------------------------------------------------------------------------------------------


class Gradient(PairedGradient, LazyGradient, Protocol):
    """The gradient of a product's output, which a fused block may be able to quantize without writing it out."""


class FloatGradient(NamedTuple):
    """A gradient that exists as a float tensor."""

    tensor: Tensor

    def written(self) -> Tensor:
        return self.tensor

    def quantized(self, clip: Tensor, key: Tensor | None) -> None:
        return None

    def by_ratio(self, ratio: float, key: Tensor | None) -> None:
        return None

    def elements(self) -> int:
        return self.tensor.numel()

    def pair(
        self, rule: magnitude.Average, before: tuple[Tensor | None, Tensor | None], key: Tensor | None, want_one: bool
    ) -> magnitude.Paired:
        return magnitude.float_pair(rule, self.tensor, *before, key, want_one=want_one)


class BlockGradient(NamedTuple):
    """The gradient of y, not written out: p·g' + q·y + r, and its Σ and Σ² of each channel where two copies are made of it."""

    parts: ops.GradientParts
    sums: tuple[Tensor, Tensor] | None

    def written(self) -> Tensor:
        return ops.normalize_grad(self.parts)

    def quantized(self, clip: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return ops.normalize_grad_quantize(self.parts, clip, key)

    def by_ratio(self, ratio: float, key: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
        return ops.normalize_grad_quantize_by_ratio(self.parts, ratio, key)

    def elements(self) -> int:
        return self.parts.g.numel()

    def pair(
        self, rule: magnitude.Average, before: tuple[Tensor | None, Tensor | None], key: Tensor | None, want_one: bool
    ) -> magnitude.Paired:
        assert self.sums is not None, "chooses_both() asks for them"
        return magnitude.gradient_pair(rule, self.parts, self.sums, *before, key, want_one=want_one)


def chooses_both(layer: Int8Layer) -> bool:
    """Whether backward may ask for clips per tensor and per channel at once."""
    if "quantizers" not in layer._modules or layer.quantizers.grad_output_for_weight is None:
        return False
    return layer.quantizers.settings["grad_output"].rule.clip.averages() is not None


def _quantize_gradient(
    layer: Int8Layer, gradient: Gradient, slot: int, training: bool, for_input: bool, for_weight: bool
) -> tuple[QTensor | None, QTensor | None]:
    """grad_output for grad_input and for grad_weight: one copy for both, or two that share their noise.

    Where no product sums over K, the copy that grad_weight wants serves both.
    """
    if not for_input and not for_weight:
        return None, None
    if "quantizers" not in layer._modules:
        raise RuntimeError(
            "backward: this layer was restored to float between forward and backward, so its int8 gradient has nowhere to go. "
            "Call byteback.restore(model) after backward."
        )
    numerics, compiling = layer.quantizers, torch.compiler.is_compiling()
    slot = layer.backward_slot(slot)
    # Both copies see the same one, also where the backward pass counts it.
    iteration: Tensor | int = numerics.iteration.clone() if compiling else int(numerics.iteration)
    if isinstance(iteration, int):
        layer.watch_for_hook(iteration)
    key = numerics.next_noise_key(layer.rank(), count_iteration=training and not layer.hooked)
    step = Step(iteration, numerics.nonfinite, slot, training)
    second = numerics.grad_output_for_weight
    shares = second is not None and layer.shares_gradient()
    if second is not None and (shares or (for_input and for_weight)) and not compiling:
        handles = numerics.handles["grad_output"], numerics.handles["grad_output_for_weight"]
        noise = key if numerics.settings["grad_output"].rule.rounding == "stochastic" else None
        both = quantize_both((numerics.grad_output, second), gradient, handles, noise, step, want_one=not shares)
        if both is not None:
            one, each = both
            return (each if shares else one) if for_input else None, each if for_weight else None

    def quantize(field: str) -> QTensor:
        noise = key if numerics.settings[field].rule.rounding == "stochastic" else None
        quantizer, handle = getattr(numerics, field), numerics.handles[field]
        if not compiling:
            held = quantize_held(quantizer, gradient, handle, noise, step)
            if held is not None:
                return held
        return quantizer.quantize(gradient.written(), handle, iteration, numerics.nonfinite, noise, slot, training)

    if second is None or shares:
        shared = quantize("grad_output_for_weight" if shares else "grad_output")
        return (shared if for_input else None), (shared if for_weight else None)
    return (
        quantize("grad_output") if for_input else None,
        quantize("grad_output_for_weight") if for_weight else None,
    )
