# SPDX-License-Identifier: Apache-2.0
"""What travels between fused blocks: the int8 activation, which is a float tensor to everybody else.

    Source      how the activation is made: act(a * x + b (+ residual)), from a convolution's output x. It can write the int8
                copy that the next convolution wants, or the float tensor, whichever is asked for, and remembers both.
    Activation  a tensor without storage around a Source. Autograd treats it as the float tensor that it stands for; the first
                operation that needs numbers makes them. In-place operations and views turn it into plain float for good.
    Poolable    an Activation that notices when it is pooled.
    carry       a plain float tensor that brings its Source along, where both copies were written anyway.

A convolution asks `source_of(x)`; None means an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from byteback import ops
from byteback.quantize import QTensor, TensorRule

SHARED_RULE = TensorRule()
"""Nearest rounding under the maximum of the whole tensor: one int8 copy serves every convolution that quantizes by it."""

_ATTRIBUTE = "_byteback_source"
_SHARED = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


HANDLERS: dict[Any, Callable[..., Any]] = {}
"""Operators that take an Activation as one and may return another (joined.py, max_pool.py), or NotImplemented."""

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Functions that a Poolable is asked about before autograd sees them; they too may return NotImplemented."""


class Joins(NamedTuple):
    """Who will read a concatenation that this activation is a part of, as far as the plan can tell."""

    conv: bool = False
    other: bool = False


class Source:
    """act(a * x + b (+ residual)), computed on demand.

    x             (N, C, ...) float32, channels last: the convolution's output
    a, b          (C,) float32
    strides       those that PyTorch would give the float result
    peak          the largest magnitude of the result, where it is known
    """

    def __init__(
        self,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        residual: ops.Residual,
        activation: str,
        strides: tuple[int, ...],
        peak: Tensor | None = None,
    ) -> None:
        self.x, self.a, self.b, self.residual, self.activation = x, a, b, residual, activation
        self.shape, self.device, self.strides = x.shape, x.device, strides
        self.peak = peak
        self.output: Tensor | None = None
        self.quantized: list[tuple[Tensor, QTensor, Tensor]] = []  # (clip, integers, (saturated, nonfinite))
        self.joins = Joins()

    def tensors(self) -> list[Tensor]:
        """What it is made of or has been written as: the memory that it holds."""
        held = [self.x, self.output, *(values.values for _, values, _ in self.quantized)]
        return [tensor for tensor in held if tensor is not None]

    def never_negative(self) -> bool:
        """Whether the activation has no value below 0."""
        return self.activation in ("relu", "relu6")

    def known_peak(self) -> Tensor | None:
        """max|activation|, where it takes no reading to tell."""
        return self.peak

    def clip(self) -> Tensor:
        """max|activation|, exactly, as a 0-dim tensor."""
        if self.peak is None:
            self.peak = ops.normalize_peak(self.x, self.a, self.b, self.residual, self.activation)
        return self.peak

    def int8(self, clip: Tensor | None = None) -> tuple[Tensor, QTensor, Tensor]:
        """(clip, integers, counts) under a given clip, or under the activation's own maximum."""
        wanted = self.clip() if clip is None else clip
        for known in self.quantized:
            if known[0] is wanted or torch.equal(known[0].reshape(()), wanted.reshape(())):
                return known
        self.write(wanted, want_float=False)
        return self.quantized[-1]

    def write(self, clip: Tensor | None, want_float: bool, want_mask: bool = False) -> Tensor | None:
        """One pass that writes what is asked for; returns the mask."""
        args = (self.x, self.a, self.b, self.residual, self.activation, clip)
        made = ops.normalize(*args, want_float=want_float, want_mask=want_mask)
        self.keep(clip, made)
        return made.mask

    def keep(self, clip: Tensor | None, made: ops.Normalized) -> None:
        """Remembers what a pass has written under this clip."""
        if made.values is not None:
            assert clip is not None and made.scale is not None and made.counts is not None
            self.quantized.append((clip, QTensor(made.values, made.scale), made.counts))
        if made.output is not None:
            self.output = self._laid_out(made.output)

    def write_into(self, clip: Tensor | None, want_float: bool, into: ops.Into) -> ops.Normalized:
        """The same into a part of a wider tensor; nothing is remembered."""
        args = (self.x, self.a, self.b, self.residual, self.activation, clip)
        return ops.normalize(*args, want_float=want_float, want_mask=False, into=into)

    def give(self) -> Tensor:
        """The float activation for somebody who may write to it."""
        output, self.output = self.plain(), None
        return output

    def plain(self) -> Tensor:
        """The float activation, without autograd."""
        if self.output is None:
            self.write(None, want_float=True)
        assert self.output is not None
        return self.output

    def _laid_out(self, output: Tensor) -> Tensor:
        if output.stride() == self.strides or output.numel() == 0:
            return output
        return torch.empty_strided(output.shape, self.strides, dtype=output.dtype, device=output.device).copy_(output)


class Activation(Tensor):
    """A float tensor whose numbers are made when somebody needs them; see the top of this file."""

    source: Source | None
    written: Tensor | None

    @staticmethod
    def __new__(cls, source: Source | None, written: Tensor | None = None) -> Activation:
        like: Any = source if source is not None else written
        strides = source.strides if source is not None else like.stride()
        self = Tensor._make_wrapper_subclass(cls, like.shape, strides=strides, dtype=torch.float32, device=like.device)
        self.source = source  # None once somebody may have written to the float copy
        self.written = written
        return self

    # Autograd first: operations reach __torch_dispatch__ below it, where only numbers matter.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _SHARED:
            return type(args[0])(args[0].source, args[0].written)
        handler = HANDLERS.get(func)
        if handler is not None and (known := handler(*args, **(kwargs or {}))) is not NotImplemented:
            return known
        exposes = any(result.alias_info is not None for result in func._schema.returns)
        target = args[0] if args and isinstance(args[0], Activation) else None
        if exposes and target is not None:
            target.settle()
        result = func(*tree_map(numbers, args), **tree_map(numbers, kwargs or {}))
        writes = target is not None and func._schema.is_mutable and result is target.written
        return target if writes else result

    def settle(self) -> Tensor:
        """The float copy as the only truth: somebody may write to it from now on."""
        if self.written is None:
            assert self.source is not None
            self.written = self.source.give()
        self.source = None
        return self.written

    def numbers(self) -> Tensor:
        """The float values, without autograd; not to be written to."""
        if self.written is not None:
            return self.written
        assert self.source is not None
        return self.source.plain()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self + 0.0) if self.requires_grad else repr(self.numbers())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.plain().__deepcopy__(memo)

    def numpy(self, *, force: bool = False) -> Any:
        return self.plain().numpy(force=force)

    def tolist(self) -> Any:
        return self.plain().tolist()

    def data_ptr(self) -> int:
        written = self.settle()  # which this object keeps
        return written.data_ptr()

    def plain(self) -> Tensor:
        """An ordinary tensor with the same values and the same history."""
        return self.view(self.shape) if self.numel() else self + 0.0


class Poolable(Activation):
    """An Activation that a pool may read: of the functions in FUNCTIONS autograd then saves what they need and no more.

    To ask about every function takes a call of Python at each look at a shape, so only these few do.
    """

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        function = FUNCTIONS.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            if function is not None and (known := function(*args, **(kwargs or {}))) is not NotImplemented:
                return known
            return func(*args, **(kwargs or {}))


def numbers(x: Any) -> Any:
    """x, or the float values of an Activation, without autograd."""
    return x.numbers() if isinstance(x, Activation) else x


def carry(output: Tensor, source: Source) -> Tensor:
    """Marks a plain float tensor as the output of `source`, until somebody writes to it."""
    setattr(output, _ATTRIBUTE, (source, output._version))
    return output


def source_of(x: Tensor) -> Source | None:
    """Where an activation comes from, if it is one and nobody has touched it."""
    if isinstance(x, Activation):
        return x.source
    source, version = getattr(x, _ATTRIBUTE, (None, 0))
    return source if source is not None and x._version == version else None


def plain(x: Any) -> Any:
    """x, or the ordinary tensor that it stands for."""
    return x.plain() if isinstance(x, Activation) else x
