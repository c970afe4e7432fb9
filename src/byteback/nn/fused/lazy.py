# SPDX-License-Identifier: Apache-2.0
"""LazyConv: the tensor that a fused convolution returns before anything is computed.

The forward of the user's model runs unchanged. The operations on this tensor are recorded as stages:

    conv(x) ── F.batch_norm ── + residual ── F.relu …           the last stage of the block computes the block

Any other operation (a print, a pool, a hook, a branch that the trace did not see) computes the recorded stages and continues
with an ordinary tensor. So a wrong description of a block only makes it slower. The result stays correct.

Each call of the convolution checks `may_fuse`. If it is False (a hook needs a tensor inside the block, torch.compile traces,
autocast changes dtypes, …), the layer runs as without a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_map

from byteback import ops
from byteback.nn.autograd import ConvProducts
from byteback.nn.fused.activations import BY_CALL, OPTIONS, WITH_MASK, misfit_of_call
from byteback.nn.fused.block import Block, Call, Stages, run_block
from byteback.nn.fused.sources import LazyActivation, Poolable
from byteback.nn.fused.step import kept
from byteback.ops.backends.registry import runs_blocks
from byteback.ops.contract import layout

_PLAIN = (Tensor, nn.Parameter, LazyActivation, Poolable)


# ---- start of a block --------------------------------------------------------------------------------------------------


# Bound once: every block asks them all.
_compiling = torch.compiler.is_compiling
_tracing = torch._C._is_tracing
_autocasts = torch.is_autocast_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack


def may_fuse(layer: Any, x: Tensor) -> bool:
    """Whether this call can run as a block."""
    block: Block | None = layer.int8_block
    if block is None or _compiling() or _tracing() or type(x) not in _PLAIN or x.dtype is not torch.float32:
        return False
    if x.is_cpu:
        if _autocasts("cpu"):
            return False
    elif not runs_blocks(x) or (not x.is_meta and _autocasts(x.device.type)):  # the meta device has no autocast
        return False
    if forward_ad._current_level >= 0 or _dispatch_modes() or _transforms() is not None or _has_any_global_hook():
        return False
    for module in (layer, *block.swallowed):
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return False
    return True


class Start(NamedTuple):
    """What a call of a convolution follows from: shapes, layouts and options. And what follows: products, size and strides."""

    products: ConvProducts
    size: torch.Size
    strides: tuple[int, ...]


def known_start(layer: Any, x: Tensor) -> tuple[Any, Start | None]:
    """Returns the key of a call on the CPU with a float32 weight, and its Start if such a call was checked before."""
    weight = layer._parameters.get("weight")
    if weight is None or weight.dtype is not torch.float32 or not (weight.is_cpu and x.is_cpu) or _compiling():
        return None, None
    options = layer.stride, layer.dilation, layer.groups, layer.padding_mode, *layer._reversed_padding_repeated_twice
    key = x.shape, x.stride(), weight.shape, weight.stride(), options
    try:
        return key, layer.__dict__["int8_sites"].get(key)
    except (TypeError, KeyError):  # options that are lists; a layer of an earlier version's pickle
        return None, None


def begin_block(
    layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: ConvProducts, slot: int, key: Any = None
) -> Tensor:
    """Returns the output of `layer` as a tensor that records the stages after it. Keeps what it has found out under `key`."""
    start = Start(products, *_output_layout(x.shape, x.stride(), weight.shape, weight.stride(), products))
    if key is not None:
        kept(layer, key, lambda: start)
    return begin_again(layer, x, weight, bias, start, slot)


def begin_again(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None, start: Start, slot: int) -> Tensor:
    """Same for a call whose Start is known."""
    block = layer.int8_block
    products, size, strides = start
    call = Call(x, layer, block, weight, bias, products, slot, size, strides, _modes(), _versions(x, weight, bias))
    lazy = LazyConv(Stages(call))
    return lazy.compute() if block.ends == "conv" else lazy


def _versions(*tensors: Tensor | None) -> list[int]:
    """Returns the version counters of tensors. Inference tensors have none, which gives 0."""
    try:
        return [0 if x is None else x._version for x in tensors]
    except RuntimeError:
        return [0 if x is None or x.is_inference() else x._version for x in tensors]


def _modes() -> tuple[bool, bool]:
    """Returns the current autograd modes. A deferred computation must run in the modes of its call."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@lru_cache(maxsize=4096)
def _output_layout(
    x: tuple[int, ...],
    x_strides: tuple[int, ...],
    weight: tuple[int, ...],
    weight_strides: tuple[int, ...],
    products: ConvProducts,
) -> tuple[torch.Size, tuple[int, ...]]:
    """Returns size and strides of the output, from those of the operands. They are the same as PyTorch's."""
    axes = zip(x[2:], weight[2:], products.stride, products.padding, products.dilation, strict=True)
    spatial = [(size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for size, kernel, stride, pad, dilation in axes]
    size = [x[0], weight[0], *spatial]
    last = 0 not in x and (layout.lies_last(x, x_strides) or layout.lies_last(weight, weight_strides))
    return torch.Size(size), layout.dense_strides(size, last)


# ---- computation -------------------------------------------------------------------------------------------------------


def _run(stages: Stages) -> Tensor:
    """Computes the block in the modes of the call. Raises RuntimeError if an operand was changed since the call."""
    call = stages.call
    now = _versions(call.x, call.weight, call.bias)
    if now != call.versions:
        what = "input" if now[0] != call.versions[0] else "weight or bias"
        raise RuntimeError(
            f"{call.layer.int8_name}: its {what} was modified in place after the call, but before its fused block was "
            f"computed, so the {what} that the block needs does not exist any more. The traced forward does not do this. "
            "Use an out-of-place operation, or prepare the model with fuse=False."
        )
    if _modes() == call.modes:
        return run_block(stages)
    grad, inference = call.modes
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        return run_block(stages)


class LazyConv(Tensor):
    """The tensor of a block that is not computed yet."""

    stages: Stages
    result: Tensor | None
    shape_of_result: torch.Size

    @staticmethod
    def __new__(cls, stages: Stages) -> LazyConv:
        call = stages.call
        self = Tensor._make_wrapper_subclass(cls, call.size, strides=call.strides, dtype=torch.float32, device=call.x.device)
        self.stages, self.result, self.shape_of_result = stages, None, call.size
        return self

    def compute(self) -> Tensor:
        """Returns the ordinary tensor (or LazyActivation) that this tensor represents."""
        if self.result is None:
            self.result = _run(self.stages)
            del self.stages  # frees the input
        return self.result

    def _next(self, inplace: bool, stages: Stages) -> Tensor:
        """Returns the block with these stages, one more than before. It is computed if this is the last stage."""
        finished = stages.reached == stages.call.block.ends
        if inplace:
            self.stages = stages
            return self.compute() if finished else self
        return _run(stages) if finished else LazyConv(stages)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stage = _STAGES.get(func)
        if stage is not None:
            taken = stage(*args, **kwargs)
            if taken is not None:
                return taken
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*tree_map(computed, args), **tree_map(computed, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Only code that bypasses __torch_function__, such as a custom autograd.Function, comes here: gradients would be lost.
        raise RuntimeError(
            f"byteback: {func} was called on the output of a fused block that is not computed yet, and here it cannot be "
            "computed with its gradient. Call .clone() on the tensor first, or prepare the model with fuse=False."
        )

    def dim(self) -> int:
        """Returns the number of axes. Norms ask for it; a method needs no call of __torch_function__."""
        return len(self.shape_of_result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.compute())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.compute().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.compute().__deepcopy__(memo)


def computed(x: Any) -> Any:
    """Returns x, or the computed tensor of a LazyConv."""
    return x.compute() if isinstance(x, LazyConv) else x


def _open(x: Any) -> bool:
    """Whether x is a block that can record another stage."""
    return isinstance(x, LazyConv) and x.result is None and x.stages.call.modes == _modes()


# ---- stages: each returns None for a call that it does not support -----------------------------------------------------


def record_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if not _open(input):
        return None
    recording: Any = input
    call, _, _, residual, activation, reached = recording.stages
    if reached != "conv":
        return None
    if training:
        F._verify_batch_size(call.size)  # type: ignore[attr-defined]
    elif running_mean is None or running_var is None:
        return None
    running = None if running_mean is None or running_var is None else (running_mean, running_var)
    for part in (running_mean, running_var, weight, bias):
        if part is not None and part.dtype is not torch.float32:
            return None
    norm = ops.BatchNorm(weight, bias, call.bias, eps, running, momentum)
    made: Tensor = recording._next(False, Stages(call, norm, training, residual, activation, "norm"))
    return made


def record_activation(input: Tensor, name: str, inplace: bool) -> Tensor | None:
    """Records the activation `name`."""
    if not _open(input):
        return None
    recording: Any = input
    call, norm, by_batch, residual, _, reached = recording.stages
    if reached == "activation" or (residual is not None and name not in WITH_MASK):
        return None
    made: Tensor = recording._next(inplace, Stages(call, norm, by_batch, residual, name, "activation"))
    return made


def _activation(call: Any, name: str, inplace: bool | None) -> Callable[..., Tensor | None]:
    options = len(OPTIONS.get(call, ()))  # the argument `inplace` follows them

    def stage(input: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        if options and misfit_of_call(call, args, kwargs):
            return None
        writes = inplace
        if writes is None:
            writes = bool(args[options] if len(args) > options else kwargs.get("inplace", False))
        return record_activation(input, name, writes)

    return stage


def _add(inplace: bool) -> Callable[..., Tensor | None]:
    def stage(left: Any, right: Any, *, alpha: Any = 1, out: Any = None) -> Tensor | None:
        if alpha != 1 or out is not None:
            return None
        block, other = (left, right) if _waits_for_add(left) or inplace else (right, left)
        if other is block or not _waits_for_add(block):
            return None
        other, size = computed(other), block.stages.call.size
        if not isinstance(other, Tensor) or tuple(other.shape) != tuple(size) or other.dtype != torch.float32:
            return None
        return block._next(inplace, block.stages._replace(residual=other, reached="add"))

    return stage


def _waits_for_add(x: Any) -> bool:
    return _open(x) and x.stages.reached in ("conv", "norm") and x.stages.call.block.ends in ("add", "activation")


_STAGES: dict[Any, Callable[..., Tensor | None]] = {
    F.batch_norm: record_norm,
    **{call: _activation(call, name, writes) for call, (name, writes) in BY_CALL.items()},
    torch.add: _add(False),
    Tensor.add: _add(False),
    Tensor.__add__: _add(False),
    Tensor.__radd__: _add(False),
    Tensor.add_: _add(True),
    Tensor.__iadd__: _add(True),
}
_METADATA = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "device", "dtype", "ndim", "layout", "is_cuda")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__),
        *(Tensor.nelement, Tensor.ndimension, Tensor.element_size),
    ]
)
