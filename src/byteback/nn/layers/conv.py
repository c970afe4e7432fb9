# SPDX-License-Identifier: Apache-2.0
"""Int8Conv1d, Int8Conv2d, Int8Conv3d: torch's convolutions with all three products in int8. FusedConv1d, 2d, 3d: float
convolutions that run as one block with their norm and activation.

All options of the torch layers are supported. The kernel does zero padding. The other padding modes, and 'same' padding with an
asymmetric border, pad the float input first; autograd computes the gradient of that.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from byteback.nn.autograd import ConvProducts
from byteback.nn.fused.block import Block
from byteback.nn.fused.lazy import begin_again, begin_block, computed, known_start, may_fuse
from byteback.nn.layers.float_table import Geometry
from byteback.nn.layers.layer import Int8Layer, weight_number
from byteback.nn.layers.transforms import RECORDED, record, refuse_script
from byteback.nn.layers.weights import own_parameter
from byteback.recipes import Recipe


class _Convolution:
    """Computes the geometry of a call. Base class of all classes here."""

    int8_name: str
    int8_block: Block | None

    def _products(self: Any, input: Tensor) -> tuple[Tensor, ConvProducts, bool]:
        """Returns the input as a batch, padded as far as the kernel cannot, the products, and whether the input was a batch."""
        known = self._known_products(input)
        if known is not None:
            return input, known, True
        spatial = len(self.kernel_size)
        batched = input.dim() == spatial + 2
        x = input if batched else input.unsqueeze(0)
        if x.dim() != spatial + 2 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"{self.int8_name}: expected input of shape (N, {self.in_channels}, ...) with {spatial} spatial dimensions, or "
                f"one sample without N, but got {tuple(input.shape)}. Check the layer before it."
            )
        x, padding = self._pad(x)
        self._check_reach(x, padding)
        return x, ConvProducts(tuple(self.stride), padding, tuple(self.dilation), self.groups), batched

    def _known_products(self: Any, input: Tensor) -> ConvProducts | None:
        """Returns the products of a batch, cached by its sizes. None if the input is no batch or the kernel cannot pad it."""
        if torch.compiler.is_compiling() or self.padding_mode != "zeros":
            return None
        border, geometry = tuple(self._reversed_padding_repeated_twice), (self.stride, self.dilation, self.groups)
        try:
            return _geometry(input.shape, self.in_channels, self.kernel_size, border, *geometry)
        except TypeError:  # symbolic sizes, or options that are lists, cannot be keys of the cache
            return None

    def _check_reach(self: Any, x: Tensor, padding: tuple[int, ...]) -> None:
        geometry = zip(self.kernel_size, self.dilation, x.shape[2:], padding, strict=True)
        for axis, (kernel, dilation, size, border) in enumerate(geometry):
            reach = dilation * (kernel - 1) + 1
            if reach > size + 2 * border:
                raise ValueError(
                    f"{self.int8_name}: the dilated kernel has size {reach} in spatial dimension {axis}, but the padded input "
                    f"only has {size + 2 * border}, so the output would be empty. Use a larger image or more padding."
                )

    def _pad(self: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Returns the input, padded as far as the kernel cannot, and the symmetric zero padding for the kernel."""
        border: list[int] = self._reversed_padding_repeated_twice
        none = (0,) * (len(border) // 2)
        if self.padding_mode != "zeros":
            return F.pad(x, border, mode=self.padding_mode), none
        pairs = list(zip(border[0::2], border[1::2], strict=True))[::-1]
        if all(left == right for left, right in pairs):
            return x, tuple(left for left, _ in pairs)
        return F.pad(x, border), none


@lru_cache(maxsize=4096)
def _geometry(
    size: tuple[int, ...],
    channels: int,
    kernel: tuple[int, ...],
    border: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> ConvProducts | None:
    """Returns the products of a batch with symmetric padding. None if the padding is asymmetric or the sizes do not fit."""
    if len(size) != len(kernel) + 2 or size[1] != channels:
        return None
    padding = border[0::2][::-1]
    if padding != border[1::2][::-1]:
        return None
    axes = zip(size[2:], kernel, dilation, padding, strict=True)
    fits = all(apart * (reach - 1) < there + 2 * pad for there, reach, apart, pad in axes)
    return ConvProducts(stride, padding, dilation, groups) if fits else None


class _Int8Conv(_Convolution, Int8Layer):
    """The forward pass of the three int8 classes."""

    int8_block: Block | None = None

    def __init__(self, *args: Any, recipe: Recipe | str = "unified-int8", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.attach(recipe, seed=torch.initial_seed(), layer=weight_number(self.weight), name=type(self).__name__)

    def channels(self) -> tuple[int, int]:
        return self.in_channels, self.out_channels  # type: ignore[return-value]

    def geometry(self) -> Geometry:
        return Geometry(*self.channels(), self.groups, self.kernel_size, self.stride, self.dilation)  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Tensor:
        """output = input ⋆ weight + bias."""
        if isinstance(input, RECORDED):
            return record(self, input)
        input = computed(input)
        fuses = self.enabled and may_fuse(self, input)
        if not fuses and ((input.is_meta and self.weight.is_meta) or not self.runs_int8()):
            return super().forward(input)
        weight, bias = own_parameter(self, "weight"), own_parameter(self, "bias")
        self.check_call(input, weight, fuses)
        key, start = known_start(self, input) if fuses else (None, None)
        if start is not None:
            return begin_again(self, input, weight, bias, start, self.next_slot())
        x, products, batched = self._products(input)
        if fuses and batched and (x is input or may_fuse(self, x)):
            self.check_dtypes(x, weight)
            return begin_block(self, x, weight, bias, products, self.next_slot(), key if x is input else None)
        output = self._alone(x, weight, bias, products)
        return output if batched else output.squeeze(0)

    def convolve(self, input: Tensor, weight: Tensor, bias: Tensor | None, products: ConvProducts) -> Tensor:
        """Runs a call of F.conv2d, which the forward of a subclass makes with a weight of its own (computed.py)."""
        x: Tensor = computed(input)
        fuses = may_fuse(self, x)
        self.check_call(x, weight, fuses)
        self._check_reach(x, products.padding)
        if fuses:
            self.check_dtypes(x, weight)
            return begin_block(self, x, weight, bias, products, self.next_slot())
        return self._alone(x, weight, bias, products)

    def _alone(self, x: Tensor, weight: Tensor, bias: Tensor | None, products: ConvProducts) -> Tensor:
        output = self.run(x, weight, products)
        if bias is not None:
            output = output + bias.to(output.dtype).reshape(1, -1, *(1,) * len(self.kernel_size))  # type: ignore
        return output


class FusedConvolution(_Convolution):
    """A float convolution that starts a block. `attach` converts a torch layer in place, `detach` converts it back."""

    float_class: type[nn.Module]
    recipe: Recipe
    enabled: bool

    def attach(self, recipe: Recipe, name: str, block: Block) -> None:
        """Stores the block and the recipe."""
        self.recipe, self.int8_name, self.int8_block, self.enabled = recipe, name, block, True

    def detach(self) -> None:
        """Converts the layer back to the torch layer."""
        for attribute in ("recipe", "int8_name", "int8_block", "enabled"):
            del self.__dict__[attribute]
        self.__class__ = self.float_class  # type: ignore[assignment]

    def runs_int8(self, product: str | None = None) -> bool:
        """Returns False."""
        return False

    def __prepare_scriptable__(self) -> None:
        refuse_script(self.int8_name)

    def forward(self: Any, input: Tensor) -> Tensor:
        """output = input ⋆ weight + bias, in float."""
        if isinstance(input, RECORDED):
            return record(self, input)
        input = computed(input)
        fits = input.dim() == len(self.kernel_size) + 2 and input.shape[1] == self.in_channels
        if not self.enabled or not fits or self.weight.dtype != torch.float32 or not may_fuse(self, input):
            return super().forward(input)  # type: ignore[misc]
        x, products, _ = self._products(input)
        return begin_block(self, x, own_parameter(self, "weight"), own_parameter(self, "bias"), products, 0)


class FusedConv1d(FusedConvolution, nn.Conv1d):
    """nn.Conv1d in float that starts a block."""

    float_class = nn.Conv1d


class FusedConv2d(FusedConvolution, nn.Conv2d):
    """nn.Conv2d in float that starts a block."""

    float_class = nn.Conv2d


class FusedConv3d(FusedConvolution, nn.Conv3d):
    """nn.Conv3d in float that starts a block."""

    float_class = nn.Conv3d


FUSED_CLASSES: dict[type[nn.Module], type[FusedConvolution]] = {
    nn.Conv1d: FusedConv1d,
    nn.Conv2d: FusedConv2d,
    nn.Conv3d: FusedConv3d,
}


class Int8Conv1d(_Int8Conv, nn.Conv1d):
    """nn.Conv1d in int8. Takes the arguments of nn.Conv1d and a `recipe`."""

    float_class = nn.Conv1d


class Int8Conv2d(_Int8Conv, nn.Conv2d):
    """nn.Conv2d in int8. Takes the arguments of nn.Conv2d and a `recipe`. Falls back to float where that is faster.

    >>> layer = Int8Conv2d(16, 16, 3, padding=1, recipe="plain-int8")
    >>> layer(torch.randn(2, 16, 5, 5)).shape, layer.runs_int8()
    (torch.Size([2, 16, 5, 5]), True)
    """

    float_class = nn.Conv2d


class Int8Conv3d(_Int8Conv, nn.Conv3d):
    """nn.Conv3d in int8. Takes the arguments of nn.Conv3d and a `recipe`."""

    float_class = nn.Conv3d
