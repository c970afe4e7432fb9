# SPDX-License-Identifier: Apache-2.0
"""Records what the int8 layers of a model read in a prediction, so that an exported file can be compared with it.

Hooks cannot: a layer with a hook does not run as part of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor

from byteback.nn import autograd as _autograd
from byteback.nn.fused import block as _block

autograd, block = cast(Any, _autograd), cast(Any, _block)


class Seen:
    """The int8 inputs of layers, and the float residuals of blocks, by the name of the layer and the number of its call."""

    def __init__(self) -> None:
        self.inputs: dict[tuple[str, int], Tensor] = {}
        self.residuals: dict[tuple[str, int], Tensor] = {}


@contextmanager
def recorded() -> Iterator[Seen]:
    """Records predictions inside the `with`. Not for several threads."""
    seen, quantize, residual_of = Seen(), autograd.quantize_input, block.residual_of

    def watched_input(layer: Any, x: Tensor, slot: int, for_grad_weight: bool) -> Any:
        made = quantize(layer, x, slot, for_grad_weight)
        seen.inputs[layer.int8_name, slot] = made.values
        return made

    def watched_residual(residual: Tensor | None, layer: Any) -> Any:
        made = residual_of(residual, layer)
        if isinstance(made, Tensor):
            number = sum(name == layer.int8_name for name, _ in seen.residuals)
            seen.residuals[layer.int8_name, number] = made
        return made

    autograd.quantize_input, block.residual_of = watched_input, watched_residual
    try:
        yield seen
    finally:
        autograd.quantize_input, block.residual_of = quantize, residual_of
