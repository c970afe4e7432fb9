# SPDX-License-Identifier: Apache-2.0
"""Concatenations and pools of LazyActivations, which return LazyActivations.

    Joined      the channels of several activations, as torch.cat(..., 1) returns them
    max-pools   commute with rounding. If the activation is never negative and every pixel is in a window, its maximum is also
                that of the pooled tensor, which need not be read. A pool that the block expects (`Poolable`) is an autograd
                function of its own, which saves one byte for each output instead of the activation (ops/pooling.py).
    pixels      F.avg_pool2d with a kernel of 1 only selects pixels

Importing this file registers them in HANDLERS and FUNCTIONS of sources.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from byteback import ops
from byteback.nn.autograd import refuse_second
from byteback.nn.fused.sources import FUNCTIONS, HANDLERS, Floats, LazyActivation, Poolable, Source, source_of
from byteback.ops.backends.cpu import allocator
from byteback.ops.contract import layout
from byteback.ops.pooling import Window, has_max_pool, max_pool, max_pool_grad, spread_pixels, take_pixels
from byteback.quantize import QTensor

Size = int | Sequence[int]


# ---- concatenations ------------------------------------------------------------------------------------------------------


class Joined(Source):
    """The channels of several sources, one after the other.

    The maximum is that of the parts, so nothing is written until the result is read. Then every part writes its own channels,
    as int8 or float, directly into the result.
    """

    def __init__(self, parts: list[Source], strides: tuple[int, ...]) -> None:
        first = parts[0].shape
        self.parts, self.device, self.strides = parts, parts[0].device, strides
        self.shape = torch.Size([first[0], sum(part.shape[1] for part in parts), *first[2:]])
        self.peak, self.quantized = None, []
        self.join_int8 = any(part.join_int8 for part in parts)
        self.join_floats = any(part.join_floats for part in parts)

    def tensors(self) -> list[Tensor]:
        written = [self.output, *(q.values for _, q in self.quantized)]
        return [tensor for part in self.parts for tensor in part.tensors()] + [t for t in written if t is not None]

    def _settle(self) -> None:
        """Lets go of the parts, of which only the maximum is needed beside the floats."""
        if not self.is_settled:
            self.clip()
            self.is_positive, self.is_settled, self.parts = self.never_negative(), True, []

    def never_negative(self) -> bool:
        return self.is_positive if self.is_settled else all(part.never_negative() for part in self.parts)

    def known_peak(self) -> Tensor | None:
        return self.clip() if all(part.known_peak() is not None for part in self.parts) else self.peak

    def clip(self) -> Tensor:
        if self.peak is None:
            self.peak = torch.stack([part.clip().reshape(()) for part in self.parts]).amax()
        return self.peak

    def write(self, clip: Tensor | None, want_float: bool, want_mask: bool = False) -> None:
        """Writes both copies in one pass if both will be read."""
        if self.is_settled:
            super().write(clip, want_float, want_mask)
            return
        want_float = want_float or (self.join_floats and self.output is None)
        if clip is None and self.join_int8 and not self.quantized:
            clip = self.clip()
        made, values, output = self._written(clip, want_float)
        copies = [part.q for part in made if part.q is not None]
        q = None
        if values is not None:
            counts = torch.stack([copy.counts for copy in copies]).sum(0)  # type: ignore[misc]
            q = QTensor(values, copies[0].scale, counts)
        self.keep(clip, ops.Normalized(q, output))
        if self.output is not None:
            self._settle()

    def _written(self, clip: Tensor | None, want_float: bool) -> tuple[list[ops.Normalized], Tensor | None, Tensor | None]:
        width = self.shape[1]
        last = self.shape[0], *self.shape[2:], width  # channels last, also for ranks without a PyTorch memory format
        order = layout.dense_strides(list(last), False)
        strides = order[0], order[-1], *order[1:-1]
        values = None if clip is None else allocator.empty(self.shape, strides, torch.int8, self.device)
        output = allocator.empty(self.shape, strides, torch.float32, self.device) if want_float else None
        made, start = [], 0
        for part in self.parts:
            end = start + part.shape[1]
            own = [None if whole is None else whole[:, start:end] for whole in (values, output)]
            into = ops.Into(own[0], own[1], width)
            made.append(part.write_into(clip, want_float, into))
            start = end
        return made, values, output


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    sources = [source_of(tensor) for tensor in tensors]
    rest = (first.shape[0], *first.shape[2:])
    for tensor, source in zip(tensors, sources, strict=True):
        fits = tensor.dim() == first.dim() and (tensor.shape[0], *tensor.shape[2:]) == rest and tensor.numel()
        # A plain tensor may be written to before the concatenation is read.
        if source is None or not fits or (isinstance(source, Floats) and not isinstance(tensor, LazyActivation)):
            return NotImplemented
    if dim not in (1, 1 - first.dim()) or first.dim() < 3:
        return NotImplemented
    parts: list[Source] = []
    for source in sources:
        is_open = isinstance(source, Joined) and not source.is_settled
        parts += source.parts if is_open else [source]  # type: ignore[list-item, union-attr]
    shape = [rest[0], sum(part.shape[1] for part in parts), *rest[1:]]
    strides = layout.dense_strides(shape, all(layout.is_channels_last(tensor) for tensor in tensors))
    return Poolable(Joined(parts, strides))


HANDLERS[torch.ops.aten.cat.default] = _cat


# ---- max-pools -----------------------------------------------------------------------------------------------------------


class MaxPool(Function):
    """F.max_pool2d of a LazyActivation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window) -> Tensor:
        source = source_of(x)
        assert source is not None
        output, taps = max_pool(source.plain(), window)
        ctx.save_for_backward(taps)
        ctx.window, ctx.size = window, x.shape
        return _pooled(source, output if layout.is_channels_last(x) else output.contiguous(), window)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None]:
        (taps,) = ctx.saved_tensors
        with torch.no_grad():
            grad = max_pool_grad(grad_output, taps, ctx.size, ctx.window)
        return refuse_second("max_pool2d", grad_output, (grad,))[0], None


def _pooled(source: Source, output: Tensor, window: Window) -> LazyActivation:
    covered = covers(source.shape[2:], output.shape[2:], window)
    peak = source.known_peak() if covered and source.never_negative() else None
    return LazyActivation(Floats(output, peak, not source.never_negative()))


def covers(pixels: Sequence[int], windows: Sequence[int], window: Window) -> bool:
    """Whether each pixel is in one of the windows.

    >>> window = Window((3, 3), (2, 2), (0, 0), (1, 1))
    >>> covers((7, 7), (3, 3), window), covers((8, 8), (3, 3), window)
    (True, False)
    """
    axes = zip(pixels, windows, window.kernel, window.stride, window.padding, window.dilation, strict=True)
    return all(
        size >= step and apart == 1 and (count - 1) * step - border + size >= there
        for there, count, size, step, border, apart in axes
    )


def _window(kernel: Size, stride: Size | None, padding: Size, dilation: Size, ceil_mode: bool) -> Window | None:
    """Returns the arguments of F.max_pool2d as a Window, or None if F.max_pool2d would raise an error for them."""
    step = kernel if stride is None or stride in ((), []) else stride
    options = [(option,) if isinstance(option, int) else tuple(option) for option in (kernel, step, padding, dilation)]
    if any(len(option) not in (1, 2) for option in options):
        return None
    kernel, step, padding, dilation = ((option[0], option[-1]) for option in options)
    return Window(kernel, step, padding, dilation, bool(ceil_mode))


# ---- max-pools that the block expects: called before autograd ------------------------------------------------------------


def _max_pool_function(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    if return_indices or not isinstance(input, Poolable) or input.source is None:
        return NotImplemented
    window = _window(kernel_size, stride, padding, dilation, ceil_mode)
    if window is None or not has_max_pool(input, window):
        return NotImplemented
    return MaxPool.apply(input, window)


FUNCTIONS[F.max_pool2d] = FUNCTIONS[torch.max_pool2d] = _max_pool_function


# ---- max-pools that the block did not expect: called after autograd ------------------------------------------------------


def _max_pool_operator(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    source = source_of(x)
    if source is None:
        return NotImplemented
    options = kernel, stride, padding, dilation, ceil_mode
    output, indices = torch.ops.aten.max_pool2d_with_indices(source.plain(), *options)
    window = _window(*options)
    assert window is not None  # PyTorch has accepted the arguments
    return _pooled(source, output, window), indices


def _max_pool_alone(*args: Any, **options: Any) -> Any:
    """Handles max_pool2d itself. Only inference mode calls it, because there PyTorch does not decompose the operator."""
    made = _max_pool_operator(*args, **options)
    return made if made is NotImplemented else made[0]


HANDLERS[torch.ops.aten.max_pool2d_with_indices.default] = _max_pool_operator
HANDLERS[torch.ops.aten.max_pool2d.default] = _max_pool_alone


# ---- pools of single pixels ----------------------------------------------------------------------------------------------


def _pair(option: Sequence[int]) -> tuple[int, int]:
    return option[0], option[-1]


def _takes_pixels(kernel: Sequence[int], padding: Sequence[int], ceil_mode: bool, divisor: int | None) -> bool:
    return _pair(kernel) == (1, 1) and _pair(padding) == (0, 0) and not ceil_mode and divisor is None


def _pixel_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Any:
    source = source_of(x)
    if source is None or not _takes_pixels(kernel, padding, ceil_mode, divisor):
        return NotImplemented
    made = take_pixels(source.plain(), _pair(stride or kernel))
    return NotImplemented if made is None else made


def _pixel_pool_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Any:
    if type(grad) is not Tensor or not _takes_pixels(kernel, padding, ceil_mode, divisor):
        return NotImplemented
    made = spread_pixels(grad, x.shape, _pair(stride or kernel))
    return NotImplemented if made is None else made


HANDLERS[torch.ops.aten.avg_pool2d.default] = _pixel_pool
HANDLERS[torch.ops.aten.avg_pool2d_backward.default] = _pixel_pool_backward
