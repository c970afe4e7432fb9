# SPDX-License-Identifier: Apache-2.0
"""Int8ConvTranspose1d, 2d, 3d: torch's transposed convolutions with all three products in int8.

A transposed convolution is the gradient of a convolution, from its output to its input. So the three products are those of that
convolution with exchanged roles (nn/autograd.py: TransposedProducts), with the same operators on every backend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from byteback.nn.autograd import ConvProducts, TransposedProducts
from byteback.nn.fused.lazy import computed
from byteback.nn.layers.float_table import Geometry
from byteback.nn.layers.layer import Int8Layer, weight_number
from byteback.nn.layers.transforms import RECORDED, record
from byteback.nn.layers.weights import own_parameter
from byteback.recipes import Recipe, resolve


class _Int8Transposed(Int8Layer):
    """The forward pass of the three int8 classes."""

    def __init__(self, *args: Any, recipe: Recipe | str = "unified-int8", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if resolve(recipe).weight.per != "tensor":
            raise ValueError(
                f"{type(self).__name__}: the recipe has weight.per={resolve(recipe).weight.per!r}, but the weight of a "
                "transposed convolution has one scale. Use weight.per='tensor'."
            )
        self.attach(recipe, seed=torch.initial_seed(), layer=weight_number(self.weight), name=type(self).__name__)

    def channels(self) -> tuple[int, int]:
        return self.in_channels, self.out_channels  # type: ignore[return-value]

    def geometry(self) -> Geometry:
        """Returns the properties of the convolution from output to input, whose products these are."""
        outputs, inputs = self.channels()
        return Geometry(inputs, outputs, self.groups, self.kernel_size, self.stride, self.dilation)  # type: ignore[arg-type]

    def is_depthwise(self) -> bool:
        """Returns False: grad_input is the output of a convolution, where no operand may have a scale per input channel."""
        return False

    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """output = input ⋆ᵀ weight + bias."""
        if isinstance(input, RECORDED):
            return record(self, input, **({} if output_size is None else {"output_size": output_size}))
        input = computed(input)
        if (input.is_meta and self.weight.is_meta) or not self.runs_int8():
            return super().forward(input, output_size)
        weight, bias = own_parameter(self, "weight"), own_parameter(self, "bias")
        self.check_call(input, weight)
        axes = len(self.kernel_size)
        x = input if input.dim() == axes + 2 else input.unsqueeze(0)
        if x.dim() != axes + 2 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"{self.int8_name}: expected input of shape (N, {self.in_channels}, ...) with {axes} spatial dimensions, or "
                f"one sample without N, but got {tuple(input.shape)}. Check the layer before it."
            )
        products, beyond = self._products(x, self._added(input, output_size))
        output = self.run(x, weight, products)
        if any(beyond):
            output = F.pad(output, [end for pad in reversed(beyond) for end in (0, pad)])
        if bias is not None:
            output = output + bias.to(output.dtype).reshape(1, -1, *(1,) * axes)
        return output if x is input else output.squeeze(0)

    def _added(self: Any, input: Tensor, output_size: list[int] | None) -> list[int]:
        """Returns the output padding of a call, as torch computes it from an output size."""
        geometry = self.stride, self.padding, self.kernel_size, len(self.kernel_size), self.dilation
        return list(self._output_padding(input, output_size, *geometry))

    def _products(self: Any, x: Tensor, added: list[int]) -> tuple[TransposedProducts, list[int]]:
        """Returns the products, and the pixels at the end of each axis that nothing is added to: they are 0.

        The convolution from output to input has an input of this size only if fewer pixels than a stride are added.
        """
        inside = [min(more, stride - 1) for more, stride in zip(added, self.stride, strict=True)]
        axes = zip(x.shape[2:], self.stride, self.padding, self.dilation, self.kernel_size, inside, strict=True)
        size = [(n - 1) * step - 2 * pad + apart * (reach - 1) + 1 + more for n, step, pad, apart, reach, more in axes]
        if min(size) < 1:
            raise ValueError(
                f"{self.int8_name}: the output of an input of shape {tuple(x.shape)} would have {size} pixels. Use a larger "
                "image or less padding."
            )
        geometry = ConvProducts(tuple(self.stride), tuple(self.padding), tuple(self.dilation), self.groups)
        return TransposedProducts(geometry, tuple(size)), [more - kept for more, kept in zip(added, inside, strict=True)]


class Int8ConvTranspose1d(_Int8Transposed, nn.ConvTranspose1d):
    """nn.ConvTranspose1d in int8. Takes the arguments of nn.ConvTranspose1d and a `recipe`."""

    float_class = nn.ConvTranspose1d


class Int8ConvTranspose2d(_Int8Transposed, nn.ConvTranspose2d):
    """nn.ConvTranspose2d in int8. Takes the arguments of nn.ConvTranspose2d and a `recipe`. Falls back to float where that is
    faster.

    >>> layer = Int8ConvTranspose2d(64, 32, 2, stride=2, recipe="plain-int8")
    >>> layer(torch.randn(2, 64, 5, 5)).shape, layer.runs_int8()
    (torch.Size([2, 32, 10, 10]), True)
    """

    float_class = nn.ConvTranspose2d


class Int8ConvTranspose3d(_Int8Transposed, nn.ConvTranspose3d):
    """nn.ConvTranspose3d in int8. Takes the arguments of nn.ConvTranspose3d and a `recipe`."""

    float_class = nn.ConvTranspose3d
