# SPDX-License-Identifier: Apache-2.0
"""What passes between fused blocks: an int8 activation, which is a float tensor for everything else.

    Source            how an activation is computed: act(a * x + b (+ residual)), from a convolution's output x. It writes the
                      int8 copy that the next convolution reads, or the float tensor, on request, and stores both.
    PredictionSource  the same without a gradient: not even x is computed before the result is read.
    Floats            a float tensor that exists. Its int8 copy is made once, for all convolutions that read it.
    LazyActivation    a tensor without storage around a Source. Autograd treats it as the float tensor that it stands for; the
                      first operation that needs values computes them. In-place operations and views make it plain float.
    Poolable          a LazyActivation that notices when it is pooled.
    attach_source     marks a plain float tensor with its Source, where both copies were written anyway.

A convolution asks `source_of(x)`; None means an ordinary tensor. pooling.py has concatenations and pools of activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from byteback import ops
from byteback.nn.fused.activations import WITH_MASK
from byteback.ops.contract import layout
from byteback.quantize import QTensor, TensorRule

if TYPE_CHECKING:
    from byteback.nn.autograd import ConvProducts

SHARED_RULE = TensorRule()
"""Nearest rounding under the maximum of the whole tensor: convolutions that quantize by it share one int8 copy."""

_ATTRIBUTE = "_byteback_source"
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)

HANDLERS: dict[Any, Callable[..., Any]] = {}
"""Operators that take a LazyActivation and may return another, or NotImplemented (pooling.py)."""

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Functions that a Poolable asks before autograd sees them; they too may return NotImplemented."""


class Int8Copy(NamedTuple):
    """The integers of an activation under a clip, and how many elements saturated and were not finite."""

    clip: Tensor
    q: QTensor
    counts: Tensor  # (saturated, nonfinite)


class OutputSpec(NamedTuple):
    """What a block's result looks like, and whether its floats will be read."""

    size: torch.Size
    strides: tuple[int, ...]
    floats: bool


class Source:
    """act(a * x + b (+ residual)), computed on demand.

    x             (N, C, ...) float32, channels last: the convolution's output
    a, b          (C,) float32
    strides       those that PyTorch would give the float result
    peak          the largest magnitude of the result, where it is known
    """

    output: Tensor | None = None
    is_settled = False  # `output` is all that is left: x and the residual are gone
    join_int8 = join_floats = False  # what will be read of a concatenation with this activation, as far as the block knows

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
        self.quantized: list[Int8Copy] = []

    def tensors(self) -> list[Tensor]:
        """The tensors whose memory it holds."""
        held = [self.x, self.output, *(copy.q.values for copy in self.quantized)]
        return [tensor for tensor in held if tensor is not None]

    def never_negative(self) -> bool:
        """Whether the activation has no value below 0."""
        return self.activation in WITH_MASK

    def known_peak(self) -> Tensor | None:
        """max|activation|, where it is known without reading the tensor."""
        return self.peak

    def clip(self) -> Tensor:
        """max|activation|, exactly, as a 0-dim tensor."""
        if self.peak is None and self.is_settled:
            self.peak = ops.absmax(self.plain(), -1).reshape(())
        elif self.peak is None:
            self.peak = ops.normalize_peak(self.x, self.a, self.b, self.residual, self.activation)
        return self.peak

    def int8(self, clip: Tensor | None = None) -> Int8Copy:
        """The int8 copy under a given clip, or under the activation's own maximum."""
        wanted = self.clip() if clip is None else clip
        for copy in self.quantized:
            if copy.clip is wanted or torch.equal(copy.clip.reshape(()), wanted.reshape(())):
                return copy
        self.write(wanted, want_float=False)
        return self.quantized[-1]

    def write(self, clip: Tensor | None, want_float: bool, want_mask: bool = False) -> Tensor | None:
        """One pass that writes what is asked for; returns the mask."""
        if self.is_settled:
            assert clip is not None and not want_mask
            self._quantize(self.plain(), clip)
            return None
        args = (self.x, self.a, self.b, self.residual, self.activation, clip)
        made = ops.normalize(*args, want_float=want_float, want_mask=want_mask)
        self.keep(clip, made)
        return made.mask

    def keep(self, clip: Tensor | None, made: ops.Normalized) -> None:
        """Stores what a pass has written under this clip."""
        if made.values is not None:
            assert clip is not None and made.scale is not None and made.counts is not None
            self.quantized.append(Int8Copy(clip, QTensor(made.values, made.scale), made.counts))
        if made.output is not None:
            self.output = self._laid_out(made.output)

    def write_into(self, clip: Tensor | None, want_float: bool, into: ops.Into) -> ops.Normalized:
        """The same into a part of a wider tensor; nothing is stored here."""
        if self.is_settled:
            return self._copy_into(self.plain(), clip, want_float, into)
        args = (self.x, self.a, self.b, self.residual, self.activation, clip)
        return ops.normalize(*args, want_float=want_float, want_mask=False, into=into)

    def give(self) -> Tensor:
        """The float activation for a caller who may write to it."""
        if self.is_settled:
            return self.plain().clone()
        if self.output is None:
            self.write(None, want_float=True)
        output, self.output = self.output, None
        assert output is not None
        return output

    def plain(self) -> Tensor:
        """The float activation, without autograd."""
        if self.output is None:
            self.write(None, want_float=True)
        assert self.output is not None
        self._settle()
        return self.output

    def settled(self, output: Tensor) -> Source:
        """A source that holds no more than `output`, the floats of this one, which somebody else holds.

        Else the next block, which holds this output as its residual, would hold y too, and this block's own residual, and so
        all floats of a residual stream. A concatenation is computed when it is read, from what nobody can write to.
        """
        if self.join_int8 or self.join_floats:
            return self
        floats = Floats(output.detach(), self.peak, not self.never_negative())  # not output itself, which will hold the source
        floats.quantized = self.quantized
        return floats

    def _settle(self) -> None:
        """Lets go of what the floats were computed from."""
        if not self.is_settled:
            self.is_settled, self.x, self.residual = True, self.x.new_empty(0), None

    def _copy_into(self, floats: Tensor, clip: Tensor | None, want_float: bool, into: ops.Into) -> ops.Normalized:
        values = scale = counts = None
        if clip is not None and into.values is not None:
            _, q, counts = self.int8(clip)
            values, scale = into.values.copy_(q.values), q.scale
        output = into.output.copy_(floats) if want_float and into.output is not None else None
        return ops.Normalized(values, scale, output, None, counts)

    def _quantize(self, floats: Tensor, clip: Tensor) -> None:
        """Stores the int8 copy of an activation that exists as floats."""
        values, scale, counts, _ = ops.quantize(floats, clip.reshape((1,) * len(self.shape)))
        self.quantized.append(Int8Copy(clip, QTensor(values, scale), counts))

    def _laid_out(self, output: Tensor) -> Tensor:
        if output.stride() == self.strides or output.numel() == 0:
            return output
        return torch.empty_strided(output.shape, self.strides, dtype=output.dtype, device=output.device).copy_(output)


class PredictionSource(Source):
    """A block of a prediction: nothing is computed before the result is read.

    No gradient will be asked for, and the clip of the int8 result is that of its reader. So the product, the norm, the
    residual, the activation and the cast to int8 are one pass (ops.conv_normalize), and the product itself is never written.
    """

    def __init__(
        self,
        operands: tuple[QTensor, QTensor],
        products: ConvProducts,
        a: Tensor,
        b: Tensor,
        residual: ops.Residual,
        activation: str,
        spec: OutputSpec,
    ) -> None:
        self.operands, self.products = operands, products
        self.a, self.b, self.residual, self.activation = a, b, residual, activation
        self.shape, self.strides, self.floats = spec
        self.device = a.device
        self.peak, self.quantized = None, []
        self.product: Tensor | None = None

    @property
    def x(self) -> Tensor:  # type: ignore[override]
        """The product after all: where a second clip, or a maximum, is asked for."""
        if self.product is None:
            self.product = channels_last(self.products.output(*self.operands))
        return self.product

    def write(self, clip: Tensor | None, want_float: bool, want_mask: bool = False) -> Tensor | None:
        if clip is not None and self.output is not None:  # the integers are those of the floats
            self._quantize(self.output, clip)
            return None
        if self.product is not None or self.quantized:
            return super().write(clip, want_float, want_mask)
        self.keep(clip, self._made(clip, want_float or self.floats, None))
        return None

    def write_into(self, clip: Tensor | None, want_float: bool, into: ops.Into) -> ops.Normalized:
        return self._made(clip, want_float, into) if self.product is None else super().write_into(clip, want_float, into)

    def settled(self, output: Tensor) -> Source:
        return self

    def _settle(self) -> None:
        """Nothing: its operands are int8, and its readers may come under another clip."""

    def _made(self, clip: Tensor | None, want_float: bool, into: ops.Into | None) -> ops.Normalized:
        (x, x_scale), (w, w_scale) = self.operands
        follows = (self.a, self.b, self.residual, self.activation, clip)
        return ops.conv_normalize(x, x_scale, w, w_scale, tuple(self.products), *follows, want_float=want_float, into=into)


class Floats(Source):
    """A float tensor that nobody writes to, or that is marked by `attach_source`, which notices writes."""

    def __init__(self, x: Tensor, peak: Tensor | None = None, negative: bool = True) -> None:
        self.x, self.shape, self.device, self.strides = x, x.shape, x.device, x.stride()
        self.peak, self.negative, self.quantized = peak, negative, []

    def never_negative(self) -> bool:
        return not self.negative

    def int8(self, clip: Tensor | None = None) -> Int8Copy:
        if clip is not None or self.peak is not None:
            return super().int8(clip)
        values, scale, peak, counts = ops.quantize_max(self.x, -1, None)
        self.peak = peak.reshape(())
        self.quantized.append(Int8Copy(self.peak, QTensor(values, scale), counts))
        return self.quantized[-1]

    def clip(self) -> Tensor:
        return self.int8().clip if self.peak is None else self.peak

    def write(self, clip: Tensor | None, want_float: bool, want_mask: bool = False) -> None:
        if clip is not None:
            self._quantize(self.x, clip)

    def write_into(self, clip: Tensor | None, want_float: bool, into: ops.Into) -> ops.Normalized:
        return self._copy_into(self.x, clip, want_float, into)

    def plain(self) -> Tensor:
        return self.x

    def give(self) -> Tensor:
        return self.x.clone()  # other readers rely on x staying as it is

    def settled(self, output: Tensor) -> Source:
        return self


class LazyActivation(Tensor):
    """A float tensor whose values are computed when they are needed; see the top of this file."""

    source: Source | None
    written: Tensor | None

    @staticmethod
    def __new__(cls, source: Source | None, written: Tensor | None = None) -> LazyActivation:
        like: Any = source if source is not None else written
        strides = source.strides if source is not None else like.stride()
        self = Tensor._make_wrapper_subclass(cls, like.shape, strides=strides, dtype=torch.float32, device=like.device)
        self.source = source  # None once the float copy may have been written to
        self.written = written
        return self

    # Autograd first: operations reach __torch_dispatch__ below it, where only values matter.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _ALIASES:
            return type(args[0])(args[0].source, args[0].written)
        handler = HANDLERS.get(func)
        if handler is not None and (known := handler(*args, **(kwargs or {}))) is not NotImplemented:
            return known
        exposes = any(result.alias_info is not None for result in func._schema.returns)
        target = args[0] if args and isinstance(args[0], LazyActivation) else None
        if exposes and target is not None:
            target.materialize_for_write()
        result = func(*tree_map(materialize, args), **tree_map(materialize, kwargs or {}))
        writes = target is not None and func._schema.is_mutable and result is target.written
        return target if writes else result

    def materialize_for_write(self) -> Tensor:
        """The float copy, which may be written to from now on; the source is dropped."""
        if self.written is None:
            assert self.source is not None
            self.written = self.source.give()
        self.source = None
        return self.written

    def materialize(self) -> Tensor:
        """The float values, without autograd; read-only."""
        if self.written is not None:
            return self.written
        assert self.source is not None
        return self.source.plain()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self + 0.0) if self.requires_grad else repr(self.materialize())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.plain().__deepcopy__(memo)

    def numpy(self, *, force: bool = False) -> Any:
        return self.plain().numpy(force=force)

    def tolist(self) -> Any:
        return self.plain().tolist()

    def data_ptr(self) -> int:
        written = self.materialize_for_write()  # which this object keeps
        return written.data_ptr()

    def plain(self) -> Tensor:
        """An ordinary tensor with the same values and the same history."""
        return self.view(self.shape) if self.numel() else self + 0.0


class Poolable(LazyActivation):
    """A LazyActivation that a pool may read: for the functions in FUNCTIONS autograd then saves only what they need.

    Asking about every function takes a call of Python at each look at a shape, so only these few tensors do.
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


def materialize(x: Any) -> Any:
    """x, or the float values of a LazyActivation, without autograd."""
    return x.materialize() if isinstance(x, LazyActivation) else x


def attach_source(output: Tensor, source: Source) -> Tensor:
    """Marks a plain float tensor as the output of `source`, until it is written to."""
    setattr(output, _ATTRIBUTE, (source.settled(output), output._version))
    return output


def source_of(x: Tensor) -> Source | None:
    """The source of an activation, if x is one and was not written to."""
    if isinstance(x, LazyActivation):
        return x.source
    source, version = getattr(x, _ATTRIBUTE, (None, 0))
    return source if source is not None and x._version == version else None


def shared_floats(x: Tensor, rule: TensorRule) -> Source | None:
    """A plain tensor from within the model as a source that all its readers share; None where only the user has it.

    A tensor without a history may be written to without PyTorch noticing (x.data, numpy), as a user's batch of images is.
    """
    if torch.compiler.is_compiling() or rule != SHARED_RULE or x.grad_fn is None or isinstance(x, LazyActivation):
        return None
    source = Floats(x.detach())  # not x itself, which will hold the source
    attach_source(x, source)
    return source


def channels_last(x: Tensor) -> Tensor:
    """x with its channels next to each other in memory, as the block's kernels need it."""
    if layout.is_last_dense(x.shape, x.stride()):
        return x
    return x.movedim(1, -1).contiguous().movedim(-1, 1)
