# SPDX-License-Identifier: Apache-2.0
"""What operators take and return besides tensors: named tuples, shared by the operators and their backends.

Legend: tensors are (N, C, ...), vectors hold one number per channel, (C,).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], int]
"""stride, padding, dilation, groups"""

Quantized = tuple[Tensor, Tensor, Tensor, Tensor]
"""values, scale, counts (saturated, non-finite), peak"""

Kept = Tensor | tuple[Tensor, Tensor, Tensor]
"""BatchNorm's input as it is stored for backward: float32, bfloat16, or (values int8, step (C,), centre (C,))."""

Residual = Tensor | tuple[Tensor, Tensor] | None
"""What is added before the activation: float32, or (values int8, scale) for values · scale."""

Running = tuple[Tensor, Tensor] | None
"""The running mean and variance of a norm, which its forward pass updates."""

Extremes = tuple[Tensor, Tensor, Tensor]
"""The smallest and largest value of each channel, and its mean, in float32."""


class ProductCall:
    """A checked product: everything about its arguments but the numbers. Made once for each set of shapes, strides and dtypes.

    a and b are the operands as the operator takes them: input and weight for "output", grad_output and weight for "grad_input",
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
        self.single = single  # one scale for either operand
        self.x_size, self.w_size, self.out_size = {
            "output": (a.shape, b.shape, self.size),
            "grad_input": (self.size, b.shape, a.shape),
            "grad_weight": (b.shape, self.size, a.shape),
        }[kind]
        self.channels = self.w_size[0]  # K
        self.plan: Any = None  # what the backend makes once for such calls


class GradientParts(NamedTuple):
    """dx = (p·gm + q·x) + r, not written out: gm is g through the activation's derivative, x as it was stored.

    a, b and mask say how the activation went (`normalize_grad_sums`).
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
    """Where a pass writes instead of into new tensors: channels [start, start + C) of tensors (N, width, ...) that are dense,
    channels last."""

    values: Tensor | None
    output: Tensor | None
    pitch: int  # the width: elements from pixel to pixel


class NormState(NamedTuple):
    """A norm as a multiplication and an addition, a·x + b: a, b in float32, mean and invstd in float64, each (C,).

    peak = max|act(a·x + b)|, 0-dim, where it is known.
    """

    a: Tensor
    b: Tensor
    mean: Tensor
    invstd: Tensor
    peak: Tensor | None = None


class Normalized(NamedTuple):
    """The results of one pass of `normalize`; None where it was not asked for. `norm`: of a norm that uses its batch."""

    values: Tensor | None
    scale: Tensor | None
    output: Tensor | None
    mask: Tensor | None
    counts: Tensor | None
    kept: Kept | None = None
    norm: NormState | None = None


class BatchNorm(NamedTuple):
    """The parameters of a norm in training; each vector (C,) or None. `bias` is the convolution's, which x leaves out."""

    gamma: Tensor | None
    beta: Tensor | None
    bias: Tensor | None
    eps: float
    running: Running
    momentum: float


class Wants(NamedTuple):
    """Which results of a forward pass are computed."""

    int8: bool
    float: bool
    mask: bool
    keep: str | None  # the norm's input for backward: "bfloat16" or "int8"


class GradSums(NamedTuple):
    """Σgm, Σ gm·x and Σgm² per channel (float64, defined bits), and gm itself; the last two None where not asked for."""

    total: Tensor
    dot: Tensor
    squares: Tensor | None
    masked: Tensor | None


class NormGradient(NamedTuple):
    """dx = (a·gm + q·x) + r, and the gradients of a norm's parameters and of the bias before it, (C,) each.

    masked is gm, sums are Σdx and Σdx² of each channel (gradient_sums). None where it was not asked for.
    """

    q: Tensor
    r: Tensor
    gamma: Tensor | None = None
    beta: Tensor | None = None
    masked: Tensor | None = None
    sums: tuple[Tensor, Tensor] | None = None
    bias: Tensor | None = None


Before = Tensor | None
"""Magnitude-aware clips of the last time; None at the first."""


class Clips(NamedTuple):
    """The clip of the tensor, (1, 1, 1, ...), those of its channels, (1, C, 1, ...), and the share of each that is Gaussian."""

    one: Tensor
    each: Tensor
    gaussian_one: Tensor | float
    gaussian_each: Tensor | float

    def of(self, copy: int) -> tuple[Tensor, Tensor | float]:
        """The clip and the Gaussian share of the first or the second copy."""
        return (self.each, self.gaussian_each) if copy else (self.one, self.gaussian_one)


class Paired(NamedTuple):
    """int8 copies under clips: (values, scale) by one clip (None if not wanted) and by a clip per channel; how many values
    each cut off, and how many are NaN or Inf."""

    clips: Clips
    one: tuple[Tensor, Tensor] | None
    each: tuple[Tensor, Tensor]
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
        """How many windows an image of this (height, width) has, as PyTorch counts them.

        >>> Window((3, 3), (2, 2), (1, 1), (1, 1)).counts((112, 112))
        (56, 56)
        """
        axes = zip(size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        height, width = (self._count(*axis) for axis in axes)
        return height, width

    def _count(self, size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
        room = size + 2 * padding - dilation * (kernel - 1) - 1
        count = (room + (stride - 1 if self.ceil_mode else 0)) // stride + 1
        # The last window must begin within the image or the padding before it.
        return count - 1 if self.ceil_mode and (count - 1) * stride >= size + padding else count

    def is_valid(self) -> bool:
        """Whether PyTorch accepts it."""
        padded = all(0 <= 2 * padding <= kernel for padding, kernel in zip(self.padding, self.kernel, strict=True))
        return padded and min(*self.kernel, *self.stride, *self.dilation) > 0


def tensors_of(x: Kept | Residual) -> tuple[Tensor, ...]:
    """The tensors that a stored input or a residual is made of."""
    return (x,) if isinstance(x, Tensor) else x or ()
