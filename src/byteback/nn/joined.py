# SPDX-License-Identifier: Apache-2.0
"""Activations that come from more than one block, or from none: concatenations, pools, float tensors with many readers.

    Joined    channels side by side, as torch.cat(..., 1) has them. Its maximum is that of its parts, so that nothing need be
              written before somebody reads it; then every part writes its own channels, int8 or float, in place.
    Floats    a float tensor that exists. Its int8 copy is made once, for all convolutions that read it.

A pool of single pixels (F.avg_pool2d with a kernel of 1) moves them and no more; max_pool.py has the pools of larger windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from byteback import ops
from byteback.nn.activation import HANDLERS, SHARED_RULE, Activation, Joins, Poolable, Source, carry, source_of
from byteback.ops.backends.cpu import allocator
from byteback.ops.contract import layout
from byteback.ops.pooling import spread_pixels, take_pixels
from byteback.quantize import QTensor, TensorRule


class Floats(Source):
    """A float tensor; whoever makes this promises that nobody writes to it, or carries it (`carry` notices writes)."""

    def __init__(self, x: Tensor, peak: Tensor | None = None, negative: bool = True) -> None:
        self.x, self.shape, self.device, self.strides = x, x.shape, x.device, x.stride()
        self.peak, self.negative = peak, negative
        self.output, self.quantized, self.joins = None, [], Joins()

    def never_negative(self) -> bool:
        return not self.negative

    def int8(self, clip: Tensor | None = None) -> tuple[Tensor, QTensor, Tensor]:
        if clip is not None or self.peak is not None:
            return super().int8(clip)
        values, scale, peak, counts = ops.quantize_max(self.x, -1, None)
        self.peak = peak.reshape(())
        self.quantized.append((self.peak, QTensor(values, scale), counts))
        return self.quantized[-1]

    def clip(self) -> Tensor:
        return self.int8()[0] if self.peak is None else self.peak

    def write(self, clip: Tensor | None, want_float: bool, want_mask: bool = False) -> None:
        if clip is not None:
            values, scale, counts, _seen = ops.quantize(self.x, clip.reshape((1,) * self.x.dim()))
            self.quantized.append((clip, QTensor(values, scale), counts))

    def write_into(self, clip: Tensor | None, want_float: bool, into: ops.Into) -> ops.Normalized:
        values = scale = counts = None
        if clip is not None and into.values is not None:
            _, q, counts = self.int8(clip)
            values, scale = into.values.copy_(q.values), q.scale
        output = into.output.copy_(self.x) if want_float and into.output is not None else None
        return ops.Normalized(values, scale, output, None, counts)

    def plain(self) -> Tensor:
        return self.x

    def give(self) -> Tensor:
        return self.x.clone()  # others may have been promised that x stays as it is


class Joined(Source):
    """The parts' channels, one after the other."""

    def __init__(self, parts: list[Source], strides: tuple[int, ...]) -> None:
        first = parts[0].shape
        self.parts, self.device, self.strides = parts, parts[0].device, strides
        self.shape = torch.Size([first[0], sum(part.shape[1] for part in parts), *first[2:]])
        self.peak, self.output, self.quantized = None, None, []
        self.joins = Joins(any(part.joins.conv for part in parts), any(part.joins.other for part in parts))

    def tensors(self) -> list[Tensor]:
        written = [self.output, *(values.values for _, values, _ in self.quantized)]
        return [tensor for part in self.parts for tensor in part.tensors()] + [t for t in written if t is not None]

    def never_negative(self) -> bool:
        return all(part.never_negative() for part in self.parts)

    def known_peak(self) -> Tensor | None:
        return self.clip() if all(part.known_peak() is not None for part in self.parts) else self.peak

    def clip(self) -> Tensor:
        if self.peak is None:
            self.peak = torch.stack([part.clip().reshape(()) for part in self.parts]).amax()
        return self.peak

    def write(self, clip: Tensor | None, want_float: bool, want_mask: bool = False) -> None:
        """Both copies at once where the plan expects both to be read."""
        want_float = want_float or (self.joins.other and self.output is None)
        if clip is None and self.joins.conv and not self.quantized:
            clip = self.clip()
        made, values, output = self._written(clip, want_float)
        if clip is not None and values is not None:
            counts = torch.stack([part.counts for part in made]).sum(0)  # type: ignore[misc]
            self.quantized.append((clip, QTensor(values, made[0].scale), counts))  # type: ignore[arg-type]
        if output is not None:
            self.output = self._laid_out(output)

    def _written(self, clip: Tensor | None, want_float: bool) -> tuple[list[ops.Normalized], Tensor | None, Tensor | None]:
        width = self.shape[1]
        last = self.shape[0], *self.shape[2:], width  # every rank has channels last, PyTorch's name for it or not
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


def shared_floats(x: Tensor, rule: TensorRule) -> Source | None:
    """A plain tensor from within the model as a source that all its readers share; None where it is nobody's but the user's.

    A tensor without a history may be written to behind PyTorch's back (x.data, numpy), as a user's batch of images is.
    """
    if torch.compiler.is_compiling() or rule != SHARED_RULE or x.grad_fn is None or isinstance(x, Activation):
        return None
    source = Floats(x.detach())  # not x itself, which will hold the source
    carry(x, source)
    return source


# ---- operators that hand an activation on ----------------------------------------------------------------------------


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    sources = [source_of(tensor) for tensor in tensors]
    rest = (first.shape[0], *first.shape[2:])
    for tensor, source in zip(tensors, sources, strict=True):
        fits = tensor.dim() == first.dim() and (tensor.shape[0], *tensor.shape[2:]) == rest and tensor.numel()
        # Floats of a plain tensor may change before the concatenation is read.
        if source is None or not fits or (isinstance(source, Floats) and not isinstance(tensor, Activation)):
            return NotImplemented
    if dim not in (1, 1 - first.dim()) or first.dim() < 3:
        return NotImplemented
    parts: list[Source] = []
    for source in sources:
        parts += source.parts if isinstance(source, Joined) else [source]  # type: ignore[list-item]
    shape = [rest[0], sum(part.shape[1] for part in parts), *rest[1:]]
    strides = layout.dense_strides(shape, all(layout.is_channels_last(tensor) for tensor in tensors))
    return Poolable(Joined(parts, strides))


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
HANDLERS[torch.ops.aten.cat.default] = _cat
