# SPDX-License-Identifier: Apache-2.0
"""What a block adds before its activation: the residual as floats, or as the int8 copy that its convolutions read anyway."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from byteback import ops
from byteback.nn.activation import SHARED_RULE, numbers, source_of
from byteback.ops.contract import layout


def residual_of(residual: Tensor | None, layer: Any) -> ops.Residual:
    """The residual as the recipe of the block's layer wants it.

    int8 needs a source that can be quantized by a known clip: in training its own maximum; in eval the tracked clip of a
    convolution that has read it, as its own maximum would make a prediction depend on its batch. Else it stays float.
    """
    if residual is None:
        return None
    recipe = layer.recipe
    source = source_of(residual) if recipe.residual_memory == "int8" and recipe.input == SHARED_RULE else None
    if source is not None:
        own_clip = layer.training or recipe.eval_clip == "batch"
        made = source.int8() if own_clip else source.quantized[0] if source.quantized else None
        # Integers cannot tell of NaN or Inf; a shortcut has no other reader who would find them.
        if made is not None and not made[2].tolist()[1]:
            return made[1].values, made[1].scale
    return channels_last(numbers(residual))


def channels_last(x: Tensor) -> Tensor:
    """x with its channels lying together, as the block's kernels want it."""
    if layout.is_last_dense(x.shape, x.stride()):
        return x
    return x.movedim(1, -1).contiguous().movedim(-1, 1)
