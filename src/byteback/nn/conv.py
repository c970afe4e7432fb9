# SPDX-License-Identifier: Apache-2.0
"""Int8Conv1d, Int8Conv2d, Int8Conv3d: torch's convolutions with all three products in int8.

Every option of the torch layer works. Zero padding goes to the kernel; the other padding modes, and 'same' padding that
needs an uneven border, pad the float input first, which autograd takes back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from byteback.nn.float_table import Geometry
from byteback.nn.layer import Int8Layer, weight_number
from byteback.nn.products import ConvProducts
from byteback.recipes import Recipe


class _Int8Conv(Int8Layer):
    """The forward pass that the three classes share."""

    def __init__(self, *args: Any, recipe: Recipe | str = "unified-int8", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.attach(recipe, seed=torch.initial_seed(), layer=weight_number(self.weight), name=type(self).__name__)

    def channels(self) -> tuple[int, int]:
        return self.in_channels, self.out_channels  # type: ignore[return-value]

    def geometry(self) -> Geometry:
        return Geometry(*self.channels(), self.groups, self.kernel_size, self.stride, self.dilation)  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Tensor:
        """output = input ⋆ weight + bias."""
        if not self.runs_int8():
            return super().forward(input)
        spatial = len(self.kernel_size)  # type: ignore[arg-type]
        batched = input.dim() == spatial + 2
        x = input if batched else input.unsqueeze(0)
        if x.dim() != spatial + 2 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"{self.int8_name}: input has shape {tuple(input.shape)}, but this layer takes (N, {self.in_channels}, ...) "
                f"with {spatial} spatial axes, or one such sample without N. Check what feeds it."
            )
        x, padding = self._pad(x)
        self._check_reach(x, padding)
        products = ConvProducts(self.stride, padding, self.dilation, self.groups)  # type: ignore[arg-type]
        output = self.run(x, products)
        if self.bias is not None:
            output = output + self.bias.to(output.dtype).reshape(1, -1, *(1,) * spatial)  # type: ignore[operator]
        return output if batched else output.squeeze(0)

    def _check_reach(self, x: Tensor, padding: tuple[int, ...]) -> None:
        geometry = zip(self.kernel_size, self.dilation, x.shape[2:], padding, strict=True)  # type: ignore[arg-type]
        for axis, (kernel, dilation, size, border) in enumerate(geometry):
            reach = dilation * (kernel - 1) + 1
            if reach > size + 2 * border:
                raise ValueError(
                    f"{self.int8_name}: the kernel reaches over {reach} pixels on spatial axis {axis}, but the padded input "
                    f"has only {size + 2 * border} there, so no output pixel exists. Use a larger image or more padding."
                )

    def _pad(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The input with what the kernel cannot pad itself, and the symmetric zero padding that it can."""
        border: list[int] = self._reversed_padding_repeated_twice  # type: ignore[assignment]
        none = (0,) * (len(border) // 2)
        if self.padding_mode != "zeros":
            return F.pad(x, border, mode=self.padding_mode), none  # type: ignore[arg-type]
        pairs = list(zip(border[0::2], border[1::2], strict=True))[::-1]
        if all(left == right for left, right in pairs):
            return x, tuple(left for left, _ in pairs)
        return F.pad(x, border), none


class Int8Conv1d(_Int8Conv, nn.Conv1d):
    """nn.Conv1d in int8; takes a `recipe` besides torch's own arguments."""

    float_class = nn.Conv1d


class Int8Conv2d(_Int8Conv, nn.Conv2d):
    """nn.Conv2d in int8; takes a `recipe` besides torch's own arguments.

    >>> layer = Int8Conv2d(3, 8, 3, padding=1, recipe="plain-int8")
    >>> layer(torch.randn(2, 3, 5, 5)).shape
    torch.Size([2, 8, 5, 5])
    """

    float_class = nn.Conv2d


class Int8Conv3d(_Int8Conv, nn.Conv3d):
    """nn.Conv3d in int8; takes a `recipe` besides torch's own arguments."""

    float_class = nn.Conv3d
