# SPDX-License-Identifier: Apache-2.0
"""F.max_pool2d that keeps one byte for each output: which tap of its window was the largest. Backward needs nothing else.

PyTorch keeps eight bytes and the whole input. The values and the gradients are PyTorch's, bit for bit. For float32 images
on the CPU and windows of at most 256 taps (`serves`); PyTorch serves the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from byteback.addresses import known, last, same_device
from byteback.ops import native
from byteback.ops.pixels import empty

_library: Any = native.library
_TAPS = 256  # what a byte can tell apart

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
        """Whether PyTorch would take it."""
        padded = all(0 <= 2 * padding <= kernel for padding, kernel in zip(self.padding, self.kernel, strict=True))
        return padded and min(*self.kernel, *self.stride, *self.dilation) > 0


def _numbers(size: Sequence[int], window: Window) -> tuple[int, ...]:
    n, c, h, w = size
    return n, h, w, c, *window.kernel, *window.stride, *window.padding, *window.dilation, *window.counts((h, w))


def serves(x: Tensor, window: Window) -> bool:
    """Whether max_pool takes this tensor (in any layout) and this window."""
    if native.number() is None or x.dim() != 4 or not x.is_cpu or x.dtype is not torch.float32 or not x.numel():
        return False
    return window.is_valid() and window.kernel[0] * window.kernel[1] <= _TAPS and min(window.counts(x.shape[2:])) > 0


def max_pool(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """(the largest of each window, which of its taps that is as uint8), both channels last.

    >>> x, window = torch.tensor([[1.0, 5.0], [3.0, 2.0]]).reshape(1, 1, 2, 2), Window((2, 2), (2, 2), (0, 0), (1, 1))
    >>> not serves(x, window) or [int(part) for part in max_pool(x, window)] == [5, 1]
    True
    """
    x = x.contiguous(memory_format=torch.channels_last)
    numbers = _numbers(x.shape, window)
    size = numbers[0], numbers[3], *numbers[-2:]
    y, taps = empty(size, x.device), empty(size, x.device, torch.uint8)
    made = known(y), known(taps)
    _library.max_pool(native.number(), numbers, last(x, torch.float32, x.numel()), *made, torch.get_num_threads())
    return y, taps


def max_pool_grad(g: Tensor, taps: Tensor, size: Sequence[int], window: Window) -> Tensor:
    """The gradient of x, which had this size, channels last: each g goes to the pixel that its tap names."""
    numbers = _numbers(size, window)
    if not g.shape == taps.shape == (numbers[0], numbers[3], *numbers[-2:]) or g.dtype is not torch.float32:
        raise ValueError(
            f"max_pool_grad: a gradient of shape {tuple(g.shape)} and {g.dtype} does not belong to windows over an image of "
            f"shape {tuple(size)}. Pass the gradient of what max_pool returned, in float32."
        )
    same_device("max_pool_grad", (g, taps))
    dx = empty(size, g.device)
    if native.number() is None or not g.is_cpu or g.is_neg():
        return _gradient(g, taps, dx, window)
    g, taps = (part.contiguous(memory_format=torch.channels_last) for part in (g, taps))
    given = last(g, torch.float32, g.numel()), last(taps, torch.uint8, g.numel())
    _library.max_pool_grad(native.number(), numbers, *given, known(dx), torch.get_num_threads())
    return dx


def _gradient(g: Tensor, taps: Tensor, dx: Tensor, window: Window) -> Tensor:
    """The same by PyTorch, for a path that changed between the passes: taps become the places that it wants."""
    rows, columns = (torch.arange(count, device=taps.device) for count in taps.shape[2:])
    taps = taps.long()
    h = rows[:, None] * window.stride[0] - window.padding[0] + taps // window.kernel[1] * window.dilation[0]
    w = columns * window.stride[1] - window.padding[1] + taps % window.kernel[1] * window.dilation[1]
    places = h * dx.shape[3] + w
    made = torch.ops.aten.max_pool2d_with_indices_backward(g, dx, *map(list, window[:4]), window.ceil_mode, places)
    return dx.copy_(made)
