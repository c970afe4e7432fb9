# SPDX-License-Identifier: Apache-2.0
"""The tensors between fused blocks: int8 for the next convolution, a float tensor for everything else.

    Source            computes act(a * x + b (+ residual)) from the output x of a convolution. On request it computes the int8
                      copy that the next convolution reads, or the float tensor, and stores both.
    PredictionSource  the same without a gradient: x too is computed only when the result is read.
    Rounded           a gradient that exists as bfloat16. Its floats are made if somebody else than the next block reads it.
    Floats            a float tensor that exists already. Its int8 copy is computed once, for all convolutions that read it.
    LazyActivation    a tensor without storage that has a Source. Autograd treats it as the float tensor that it represents.
                      The first operation that needs values computes them. In-place operations and views make it plain float.
    Poolable          a LazyActivation with its own implementation of pooling functions.
    attach_source     attaches a Source to a plain float tensor, if the float copy exists too.

A convolution calls `source_of(x)`, which is None for an ordinary tensor. pooling.py has concatenations and pools.
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
from byteback.ops.quantizer import same_clip
from byteback.quantize import QTensor, TensorRule

if TYPE_CHECKING:
    from byteback.nn.autograd import ConvProducts

SHARED_RULE = TensorRule()
"""Rounding to nearest with the maximum of the whole tensor as clip. Convolutions with this rule share one int8 copy."""

_LAST = torch.channels_last
_ATTRIBUTE = "_byteback_source"
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)

HANDLERS: dict[Any, Callable[..., Any]] = {}
"""Implementations of operators for a LazyActivation. They may return NotImplemented (pooling.py)."""

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Implementations of functions for a Poolable, called before autograd. They may return NotImplemented."""


class OutputSpec(NamedTuple):
    """Size and strides of the result of a block, and whether its float values will be read."""

    size: torch.Size
    strides: tuple[int, ...]
    floats: bool


class Source:
    """Computes act(a * x + b (+ residual)) on demand.

    x             (N, C, ...) float32, channels last: the output of the convolution
    a, b          (C,) float32
    strides       those that PyTorch would give the float result
    peak          the largest magnitude of the result, if it is known
    """

    output: Tensor | None = None
    rounded: Tensor | None = None  # the floats as bfloat16, channels last, if that is how they travel
    is_settled = False  # only the floats are left: x and the residual were released
    join_int8 = join_floats = False  # which copies of a concatenation with this activation the block expects to be read

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
        self.quantized: list[tuple[Tensor, QTensor]] = []  # int8 copies, each with its clip

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that this source keeps in memory."""
        held = [self.x, self.output, self.rounded, *(q.values for _, q in self.quantized)]
        return [tensor for tensor in held if tensor is not None]

    def never_negative(self) -> bool:
        """Whether no value of the activation is below 0."""
        return self.activation in WITH_MASK

    def known_peak(self) -> Tensor | None:
        """Returns max|activation| if it is known without reading the tensor, else None."""
        return self.peak

    def clip(self) -> Tensor:
        """Returns the exact max|activation| as a 0-dim tensor."""
        if self.peak is None and self.is_settled:
            self.peak = ops.absmax(self.plain(), -1).reshape(())
        elif self.peak is None:
            self.peak = ops.normalize_peak(self.x, self.a, self.b, self.residual, self.activation)
        return self.peak

    def int8(self, clip: Tensor | None = None) -> tuple[Tensor, QTensor]:
        """Returns the int8 copy for a given clip, with the clip. By default this is the maximum of the activation."""
        wanted = self.clip() if clip is None else clip
        for copy in self.quantized:
            if same_clip(copy[0], wanted):
                return copy
        self.write(wanted, want_float=False)
        return self.quantized[-1]

    def write(self, clip: Tensor | None, want_float: bool, want_mask: bool = False) -> Tensor | None:
        """Computes and stores what is asked for, in one pass. Returns the mask."""
        if self.is_settled:
            assert clip is not None and not want_mask
            self._quantize(self.plain(), clip)
            return None
        args = (self.x, self.a, self.b, self.residual, self.activation, clip)
        made = ops.normalize(*args, want_float=want_float, want_mask=want_mask)
        self.keep(clip, made)
        return made.mask

    def keep(self, clip: Tensor | None, made: ops.Normalized) -> None:
        """Stores the results of a pass with this clip."""
        if made.q is not None:
            assert clip is not None
            self.quantized.append((clip, made.q))
        if made.output is not None and made.output.dtype is torch.bfloat16:
            self.rounded = made.output
        elif made.output is not None:
            self.output = self._laid_out(made.output)

    def write_into(self, clip: Tensor | None, want_float: bool, into: ops.Into) -> ops.Normalized:
        """Same as `write`, but writes into a slice of a wider tensor and stores nothing here."""
        if self.is_settled:
            return self._copy_into(self.plain(), clip, want_float, into)
        args = (self.x, self.a, self.b, self.residual, self.activation, clip)
        return ops.normalize(*args, want_float=want_float, want_mask=False, into=into)

    def give(self) -> Tensor:
        """Returns the float activation. The caller may write to it."""
        if self.rounded is not None:
            return self._laid_out(self.rounded.float())
        if self.is_settled:
            return self.plain().clone()
        if self.output is None:
            self.write(None, want_float=True)
        output, self.output = self.output, None
        assert output is not None
        return output

    def plain(self) -> Tensor:
        """Returns the float activation, without autograd. The caller must not write to it."""
        if self.output is None and self.rounded is not None:
            self.output = self._laid_out(self.rounded.float())
        elif self.output is None:
            self.write(None, want_float=True)
        assert self.output is not None
        self._settle()
        return self.output

    def release(self) -> None:
        """Lets go of what rounded floats were computed from. From now on they are the activation."""
        if self.rounded is not None:
            self._settle()

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
        copied = None
        if clip is not None and into.values is not None:
            _, q = self.int8(clip)
            copied = q._replace(values=into.values.copy_(q.values))
        return ops.Normalized(copied, into.output.copy_(floats) if want_float and into.output is not None else None)

    def _quantize(self, floats: Tensor, clip: Tensor) -> None:
        """Quantizes an activation that exists as float, and stores the int8 copy."""
        self.quantized.append((clip, ops.quantize(floats, clip.reshape((1,) * len(self.shape)))))

    def _laid_out(self, output: Tensor) -> Tensor:
        if output.stride() == self.strides or output.numel() == 0:
            return output
        return torch.empty_strided(output.shape, self.strides, dtype=output.dtype, device=output.device).copy_(output)


class FloatPrediction(Source):
    """A block without gradient whose product is float. Its int8 copy is written together with the floats that will be read."""

    floats = False

    def write(self, clip: Tensor | None, want_float: bool, want_mask: bool = False) -> Tensor | None:
        if self.output is not None and clip is not None:  # quantizing the float result gives the same integers
            self._quantize(self.output, clip)
            return None
        return super().write(clip, want_float or self.floats, want_mask)


class PredictionSource(Source):
    """A block without gradient: nothing is computed until the result is read.

    No gradient is needed, and the clip of the int8 result is that of its reader. So the product, the norm, the residual, the
    activation and the cast to int8 are one pass (ops.conv_normalize), and the product itself is not stored.
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
        plan: Any = None,  # ops/block_step.py: block_prediction
    ) -> None:
        self.operands, self.products, self.plan = operands, products, plan
        self.a, self.b, self.residual, self.activation = a, b, residual, activation
        self.shape, self.strides, self.floats = spec
        self.device = a.device
        self.peak, self.quantized = None, []
        self.product: Tensor | None = None

    @property
    def x(self) -> Tensor:  # type: ignore[override]
        """The product. It is computed only if a second clip or a maximum is needed."""
        if self.product is None:
            self.product = channels_last(self.products.output(*self.operands))
        return self.product

    def write(self, clip: Tensor | None, want_float: bool, want_mask: bool = False) -> Tensor | None:
        if clip is not None and self.output is not None:  # quantizing the float result gives the same integers
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
        x, w = self.operands
        if self.plan is not None and into is None:
            made: ops.Normalized | None = self.plan.run(x, w, self.a, self.b, self.residual, clip, want_float)
            if made is not None:
                return made
        operands = x.values, x.scale, w.values, w.scale, tuple(self.products)
        follows = (self.a, self.b, self.residual, self.activation, clip)
        return ops.conv_normalize(*operands, *follows, want_float=want_float, into=into)


class Floats(Source):
    """A float tensor that is not written to, or one with `attach_source`, which detects writes."""

    def __init__(self, x: Tensor, peak: Tensor | None = None, negative: bool = True) -> None:
        self.x, self.shape, self.device, self.strides = x, x.shape, x.device, x.stride()
        self.peak, self.negative, self.quantized = peak, negative, []

    def never_negative(self) -> bool:
        return not self.negative

    def int8(self, clip: Tensor | None = None) -> tuple[Tensor, QTensor]:
        if clip is not None or self.peak is not None:
            return super().int8(clip)
        values, scale, peak, counts = ops.quantize_max(self.x, -1, None)
        self.peak = peak.reshape(())
        self.quantized.append((self.peak, QTensor(values, scale, counts, self.peak)))
        return self.quantized[-1]

    def clip(self) -> Tensor:
        return self.int8()[0] if self.peak is None else self.peak

    def write(self, clip: Tensor | None, want_float: bool, want_mask: bool = False) -> None:
        if clip is not None:
            self._quantize(self.x, clip)

    def write_into(self, clip: Tensor | None, want_float: bool, into: ops.Into) -> ops.Normalized:
        return self._copy_into(self.x, clip, want_float, into)

    def plain(self) -> Tensor:
        return self.x

    def give(self) -> Tensor:
        return self.x.clone()  # other readers need x unchanged

    def settled(self, output: Tensor) -> Source:
        return self


class Rounded(Source):
    """A float tensor that exists as bfloat16, channels last: a gradient between two blocks."""

    is_settled = True

    def __init__(self, x: Tensor) -> None:
        self.x = self.rounded = x
        self.shape, self.device, self.strides = x.shape, x.device, x.stride()
        self.peak, self.quantized = None, []

    def never_negative(self) -> bool:
        return False


class LazyActivation(Tensor):
    """A float tensor whose values are computed when they are needed. The docstring of this file explains it."""

    source: Source | None
    written: Tensor | None

    @staticmethod
    def __new__(cls, source: Source | None, written: Tensor | None = None) -> LazyActivation:
        like: Any = source if source is not None else written
        strides = source.strides if source is not None else like.stride()
        self = Tensor._make_wrapper_subclass(cls, like.shape, strides=strides, dtype=torch.float32, device=like.device)
        self.source = source  # None as soon as the float copy may be written to
        self.written = written
        return self

    # Disabled, so that autograd comes first. __torch_dispatch__ is called after autograd and computes only values.
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
        """Returns the float copy, which may be written to from now on. Removes the source."""
        if self.written is None:
            assert self.source is not None
            self.written = self.source.give()
        self.source = None
        return self.written

    def materialize(self) -> Tensor:
        """Returns the float values, without autograd. They are read-only."""
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
        written = self.materialize_for_write()  # this object keeps it alive
        return written.data_ptr()

    def plain(self) -> Tensor:
        """Returns an ordinary tensor with the same values and the same autograd history."""
        return self.view(self.shape) if self.numel() else self + 0.0


class Poolable(LazyActivation):
    """A LazyActivation that a pool may read. For the functions in FUNCTIONS, autograd saves only what they need.

    Its __torch_function__ makes every access slower, even to a shape, so only the tensors that need it are Poolable.
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
    """Returns x, or the float values of a LazyActivation, without autograd."""
    return x.materialize() if isinstance(x, LazyActivation) else x


def attach_source(output: Tensor, source: Source) -> Tensor:
    """Marks a plain float tensor as the output of `source`. The mark is valid until the tensor is written to."""
    setattr(output, _ATTRIBUTE, (source.settled(output), output._version))
    return output


def source_of(x: Tensor) -> Source | None:
    """Returns the source of an activation; None if x has no source or was written to."""
    if isinstance(x, LazyActivation):
        return x.source
    source, version = getattr(x, _ATTRIBUTE, (None, 0))
    return source if source is not None and x._version == version else None


def shared_floats(x: Tensor, rule: TensorRule) -> Source | None:
    """Returns a source that all readers of a plain tensor share; None if the tensor has no autograd history.

    PyTorch may not detect writes to a tensor without history (x.data, numpy). A batch of images is such a tensor.
    """
    if torch.compiler.is_compiling() or rule != SHARED_RULE or x.grad_fn is None or isinstance(x, LazyActivation):
        return None
    source = Floats(x.detach())  # not x itself, which would be a reference cycle
    attach_source(x, source)
    return source


def floats_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of floats_of(x)."""
    source = source_of(x)
    return torch.float32 if source is None or source.rounded is None else torch.bfloat16


def floats_of(residual: Tensor) -> Tensor:
    """Returns a residual as floats, channels last: bfloat16 if the block that computed it has rounded it, else float32."""
    source = source_of(residual)
    rounded = None if source is None else source.rounded
    return channels_last(materialize(residual)) if rounded is None else rounded


def channels_last(x: Tensor) -> Tensor:
    """Returns x in channels-last memory format, which the kernels of a block need."""
    # The first condition is the same for two spatial axes, and faster.
    if (x.dim() == 4 and x.is_contiguous(memory_format=_LAST)) or layout.is_last_dense(x.shape, x.stride()):
        return x
    return x.movedim(1, -1).contiguous().movedim(-1, 1)
