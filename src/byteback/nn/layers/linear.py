# SPDX-License-Identifier: Apache-2.0
"""Int8Linear: torch's Linear with all three products in int8. The papers keep Linear in float; Recipe.linear converts it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from byteback.nn.autograd import LinearProducts
from byteback.nn.layers.float_table import Geometry
from byteback.nn.layers.layer import Int8Layer, weight_number
from byteback.nn.layers.transforms import RECORDED, record
from byteback.nn.layers.weights import own_parameter
from byteback.recipes import Recipe


class Int8Linear(Int8Layer, nn.Linear):
    """nn.Linear in int8. Takes the arguments of nn.Linear and a `recipe`. Falls back to float where that is faster.

    >>> layer = Int8Linear(128, 64, recipe="plain-int8")
    >>> layer(torch.randn(3, 5, 128)).shape, layer.runs_int8()
    (torch.Size([3, 5, 64]), True)
    """

    float_class = nn.Linear

    def __init__(self, *args: Any, recipe: Recipe | str = "unified-int8", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.attach(recipe, seed=torch.initial_seed(), layer=weight_number(self.weight), name=type(self).__name__)

    def channels(self) -> tuple[int, int]:
        return self.in_features, self.out_features

    def geometry(self) -> Geometry:
        return Geometry(*self.channels())

    def forward(self, input: Tensor) -> Tensor:
        """output = input @ weightᵀ + bias, over the last axis."""
        if isinstance(input, RECORDED):
            return record(self, input)
        if (input.is_meta and self.weight.is_meta) or not self.runs_int8():
            return super().forward(input)
        weight = own_parameter(self, "weight")
        self.check_call(input, weight)
        if input.dim() < 1 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"{self.int8_name}: expected input of shape (..., {self.in_features}), but got {tuple(input.shape)}. "
                "Check the layer before it."
            )
        rows = input.reshape(-1, self.in_features)
        output = self.run(rows, weight, LinearProducts())
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output.reshape(*input.shape[:-1], self.out_features)
