# SPDX-License-Identifier: Apache-2.0
"""Named tuples that operators and their backends take and return.

Legend: tensors are (N, C, ...), vectors have one number per channel, (C,).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], int]
"""stride, padding, dilation, groups"""


class QTensor(NamedTuple):
    """int8 values and their scale: values * scale approximates the tensor that was quantized.

    values  int8 in [-127, 127]
    scale   float32, positive, of the same rank, with size 1 along the axes that share it, so its shape is the granularity
    counts  int64: how many elements were saturated, and how many were NaN or Inf; None if not counted
    peak    max|x| of the tensor that was quantized; None if it is not known

    >>> import torch
    >>> q = QTensor(torch.tensor([[127, -64]], dtype=torch.int8), torch.tensor([[0.5]]))
    >>> q.dequantize().tolist()
    [[63.5, -32.0]]
    """

    values: Tensor
    scale: Tensor
    counts: Tensor | None = None
    peak: Tensor | None = None

    def dequantize(self) -> Tensor:
        """Returns values * scale in float32."""
        return self.values.float() * self.scale


class PackedQTensor(QTensor):
    """A QTensor with a copy of its values packed by 16 images (contract/packing.py), which grad_weight reads on a GPU."""

    packed: Tensor


def for_grad_weight(q: QTensor) -> Tensor:
    """Returns the integers that grad_weight reads: the packed copy if there is one, else the values."""
    return q.packed if isinstance(q, PackedQTensor) else q.values


Kept = Tensor | tuple[Tensor, Tensor, Tensor]
"""The input of a BatchNorm, saved for backward: float32, bfloat16, or (values int8, step (C,), centre (C,))."""

Residual = Tensor | QTensor | None
"""The tensor that is added before the activation: float32, or int8 with one scale, which means values · scale."""

Running = tuple[Tensor, Tensor] | None
"""The running mean and variance of a norm, which its forward pass updates."""

Extremes = tuple[Tensor, Tensor, Tensor]
"""The smallest and largest value of each channel, and its mean, in float32."""


class ProductCall:
    """A checked call of a product, without its values. It is created once for each set of shapes, strides and dtypes.

    a and b are the operands of the operator: input and weight for "output", grad_output and weight for "grad_input",
    grad_output and input for "grad_weight".
    """

    __slots__ = ("channels", "geometry", "groups", "kind", "out_size", "plan", "single", "size", "strides", "w_size", "x_size")

    def __init__(
        self, kind: str, size: Sequence[int], strides: Sequence[int], a: Tensor, b: Tensor, geometry: Geometry, single: bool
    ) -> None:
        self.kind = kind
        self.size = tuple(size)  # of the result
        self.strides = tuple(strides)
        self.geometry = geometry
        self.groups = geometry[3]
        self.single = single  # each operand has a single scale
        self.x_size, self.w_size, self.out_size = {
            "output": (a.shape, b.shape, self.size),
            "grad_input": (self.size, b.shape, a.shape),
            "grad_weight": (b.shape, self.size, a.shape),
        }[kind]
        self.channels = self.w_size[0]  # K
        self.plan: Any = None  # what the backend prepares once for such calls


class GradientParts(NamedTuple):
    """The parts of dx = (p·gm + q·x) + r, which is not stored. gm = g · activation'(z), x is the saved input of the norm.

    a, b and mask determine the derivative of the activation (`normalize_grad_sums`). g is float32 or bfloat16.
    """

    g: Tensor
    x: Kept
    a: Tensor | None
    b: Tensor | None
    mask: Tensor | None
    activation: str
    p: Tensor
    q: Tensor
    r: Tensor


class Into(NamedTuple):
    """The tensors that a pass writes to instead of new ones: channels [start, start + C) of tensors (N, width, ...) that are
    dense and channels last."""

    values: Tensor | None
    output: Tensor | None
    pitch: int  # the width: number of elements from pixel to pixel


class NormState(NamedTuple):
    """A norm as a multiplication and an addition, a·x + b. a, b are float32, mean and invstd are float64, each (C,).

    peak = max|act(a·x + b)|, 0-dim, if it is known.
    """

    a: Tensor
    b: Tensor
    mean: Tensor
    invstd: Tensor
    peak: Tensor | None = None


class Normalized(NamedTuple):
    """The results of one pass of `normalize`; None for those not requested. `norm` is set if batch statistics are used."""

    q: QTensor | None = None
    output: Tensor | None = None
    mask: Tensor | None = None
    kept: Kept | None = None
    norm: NormState | None = None


class BatchNorm(NamedTuple):
    """The parameters of a norm in training; vectors are (C,) or None. `bias` is that of the convolution, not included in x."""

    gamma: Tensor | None
    beta: Tensor | None
    bias: Tensor | None
    eps: float
    running: Running
    momentum: float


class Wants(NamedTuple):
    """Which results of a forward pass are computed, and in which dtypes those that the next pass reads are stored."""

    int8: bool
    float: bool
    mask: bool
    keep: str | None  # the norm's input for backward: "bfloat16" or "int8"
    y: torch.dtype = torch.float32  # the convolution's output: float32 or bfloat16
    output: torch.dtype = torch.float32  # the float result: float32 or bfloat16
    packed: bool = False  # a copy of the int8 result for grad_weight, if the backend uses one (PackedQTensor)


class GradSums(NamedTuple):
    """Σgm, Σ gm·x and Σgm² per channel (float64, defined bits), and gm itself. The last two are None if not requested."""

    total: Tensor
    dot: Tensor
    squares: Tensor | None
    masked: Tensor | None


class NormGradient(NamedTuple):
    """q and r of dx = (a·gm + q·x) + r, and the gradients of the parameters of a norm and of the bias before it, (C,) each.

    masked is gm, sums are Σdx and Σdx² of each channel (gradient_sums). None if not requested.
    """

    q: Tensor
    r: Tensor
    gamma: Tensor | None = None
    beta: Tensor | None = None
    masked: Tensor | None = None
    sums: tuple[Tensor, Tensor] | None = None
    bias: Tensor | None = None


Before = Tensor | None
"""The magnitude-aware clips of the previous step; None at the first."""


class Clips(NamedTuple):
    """The clip of the tensor, (1, 1, 1, ...), those of its channels, (1, C, 1, ...), and for both the Gaussian share."""

    one: Tensor
    each: Tensor
    gaussian_one: Tensor | float
    gaussian_each: Tensor | float

    def of(self, copy: int) -> tuple[Tensor, Tensor | float]:
        """Returns the clip and the Gaussian share of the first or the second copy."""
        return (self.each, self.gaussian_each) if copy else (self.one, self.gaussian_one)


class Paired(NamedTuple):
    """int8 copies by one clip (None if not wanted) and by a clip per channel; how many values are saturated in each, and how
    many are NaN or Inf. These are numbers: the native library returns them so."""

    clips: Clips
    one: QTensor | None
    each: QTensor
    saturated: tuple[int, int]
    nonfinite: int


Pair = tuple[int, int]


class Window(NamedTuple):
    """The arguments of F.max_pool2d, each for height and width."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil_mode: bool = False

    def counts(self, size: Sequence[int]) -> Pair:
        """Returns how many windows an image of this (height, width) has, as in PyTorch.

        >>> Window((3, 3), (2, 2), (1, 1), (1, 1)).counts((112, 112))
        (56, 56)
        """
        axes = zip(size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        height, width = (self._count(*axis) for axis in axes)
        return height, width

    def _count(self, size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
        room = size + 2 * padding - dilation * (kernel - 1) - 1
        count = (room + (stride - 1 if self.ceil_mode else 0)) // stride + 1
        # The last window must start in the image or in the padding before it.
        return count - 1 if self.ceil_mode and (count - 1) * stride >= size + padding else count

    def is_valid(self) -> bool:
        """Whether PyTorch accepts these arguments."""
        padded = all(0 <= 2 * padding <= kernel for padding, kernel in zip(self.padding, self.kernel, strict=True))
        return padded and min(*self.kernel, *self.stride, *self.dilation) > 0


def tensors_of(x: Kept | Residual) -> tuple[Tensor | None, ...]:
    """Returns the tensors of a saved input or a residual."""
    return (x,) if isinstance(x, Tensor) else x or ()
