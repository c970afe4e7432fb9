# SPDX-License-Identifier: Apache-2.0
"""Max-pools of activations.

A max-pool commutes with rounding. Where the activation is never negative and every pixel lies in a window, its maximum is also
that of the pooled tensor: one reading less. And where the plan saw the pool coming (`Poolable`), it runs as a function of its
own, which keeps one byte for each output instead of the activation (ops/pooling.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from byteback.nn.activation import FUNCTIONS, HANDLERS, Activation, Poolable, Source, source_of
from byteback.nn.functional import refuse_second
from byteback.nn.joined import Floats
from byteback.ops.contract import layout
from byteback.ops.pooling import Window, has_max_pool, max_pool, max_pool_grad

Size = int | Sequence[int]


class MaxPool(Function):
    """F.max_pool2d of an Activation."""

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


def _pooled(source: Source, output: Tensor, window: Window) -> Activation:
    covered = covers(source.shape[2:], output.shape[2:], window)
    peak = source.known_peak() if covered and source.never_negative() else None
    return Activation(Floats(output, peak, not source.never_negative()))


def covers(pixels: Sequence[int], windows: Sequence[int], window: Window) -> bool:
    """Whether each pixel lies in one of the windows.

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
    """The arguments of F.max_pool2d, or None for those that it will refuse."""
    step = kernel if stride is None or stride in ((), []) else stride
    options = [(option,) if isinstance(option, int) else tuple(option) for option in (kernel, step, padding, dilation)]
    if any(len(option) not in (1, 2) for option in options):
        return None
    kernel, step, padding, dilation = ((option[0], option[-1]) for option in options)
    return Window(kernel, step, padding, dilation, bool(ceil_mode))


# ---- above autograd: the plan saw the pool coming ------------------------------------------------------------------------


def _function(
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


FUNCTIONS[F.max_pool2d] = FUNCTIONS[torch.max_pool2d] = _function


# ---- below autograd: whoever did not see it ------------------------------------------------------------------------------


def _operator(
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
    assert window is not None  # PyTorch took it
    return _pooled(source, output, window), indices


def _operator_alone(*args: Any, **options: Any) -> Any:
    """What inference mode calls: there the operator is not taken apart first."""
    made = _operator(*args, **options)
    return made if made is NotImplemented else made[0]


HANDLERS[torch.ops.aten.max_pool2d_with_indices.default] = _operator
HANDLERS[torch.ops.aten.max_pool2d.default] = _operator_alone
