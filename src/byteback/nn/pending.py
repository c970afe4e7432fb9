# SPDX-License-Identifier: Apache-2.0
"""A block on its way: the tensor that a fused convolution returns before anything is computed.

The user's own forward keeps running. What it does to this tensor is caught and written down, stage by stage:

    conv(x) ── F.batch_norm ── + residual ── F.relu …           the stage that the plan names as the last one computes the block

Anything else that happens to it (a print, a pool, a hook, a branch that the trace did not see) computes what was written
down so far and goes on with an ordinary tensor. So a wrong plan costs speed, never numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map


@dataclass(frozen=True)
class BlockPlan:
    """What is expected to follow a convolution, and who reads the result (byteback/fuse finds out)."""

    ends: str  # "conv" | "norm" | "add" | "activation"
    feeds_conv: bool = True
    feeds_other: bool = True  # somebody who needs a plain float tensor
    feeds_pool: bool = False  # a max-pool, or one of single pixels: it needs the floats, and takes them from an Activation
    feeds_join: bool = False  # a concatenation of channels, which is written when it is read
    join_feeds_conv: bool = False
    join_feeds_other: bool = False
    feeds_add: bool = False  # another block, as its residual


class Norm(NamedTuple):
    """The arguments of F.batch_norm."""

    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    training: bool
    momentum: float
    eps: float


class Stages(NamedTuple):
    """A block as far as it is known. `compute` turns it into a tensor; `modes` are those under which it was begun."""

    compute: Callable[[Stages], Tensor]
    plan: BlockPlan
    modes: tuple[bool, bool]
    norm: Norm | None = None
    residual: Tensor | None = None
    activation: str = "none"
    reached: str = "conv"


def modes() -> tuple[bool, bool]:
    """The autograd modes that a deferred computation must be run under."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def run(stages: Stages) -> Tensor:
    """The block's tensor, computed under the modes that it was begun under."""
    if modes() == stages.modes:
        return stages.compute(stages)
    grad, inference = stages.modes
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        return stages.compute(stages)


class Pending(Tensor):
    """The tensor of a block that is not computed yet."""

    stages: Stages
    result: Tensor | None
    seen: tuple[Sequence[int], tuple[int, ...], torch.device]  # size, strides and device, as PyTorch would tell them

    @staticmethod
    def __new__(cls, stages: Stages, size: Sequence[int], strides: tuple[int, ...], device: torch.device) -> Pending:
        self = Tensor._make_wrapper_subclass(cls, size, strides=strides, dtype=torch.float32, device=device)
        self.stages, self.result, self.seen = stages, None, (size, strides, device)
        return self

    def compute(self) -> Tensor:
        """The ordinary tensor (or Activation) that this one stands for."""
        if self.result is None:
            self.result = run(self.stages)
            del self.stages  # lets go of the input
        return self.result

    def _next(self, inplace: bool, **changes: Any) -> Tensor:
        """The block with one more stage, computed if that was the last one."""
        stages = self.stages._replace(**changes)
        finished = stages.reached == stages.plan.ends
        if inplace:
            self.stages = stages
            return self.compute() if finished else self
        return run(stages) if finished else Pending(stages, *self.seen)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        stage = _STAGES.get(func)
        if stage is not None:
            taken = stage(*args, **kwargs)
            if taken is not None:
                return taken
        return func(*tree_map(settled, args), **tree_map(settled, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Reached only by code that bypasses __torch_function__, such as a custom autograd.Function: history would be lost.
        raise RuntimeError(
            f"byteback: {func} met the output of a fused block that is not computed yet, in a place where it cannot be "
            "computed with its gradient. Call .clone() on the tensor first, or prepare the model with fuse=False."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.compute())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.compute().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.compute().__deepcopy__(memo)


def settled(x: Any) -> Any:
    """x, or what it stands for once computed."""
    return x.compute() if isinstance(x, Pending) else x


def _open(x: Any) -> bool:
    """Whether x is a block that can still take a stage."""
    return isinstance(x, Pending) and x.result is None and x.stages.modes == modes()


# ---- the stages: each returns None for what it does not know ---------------------------------------------------------


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if not _open(input) or input.stages.reached != "conv":  # type: ignore[attr-defined]
        return None
    if training:
        F._verify_batch_size(input.seen[0])  # type: ignore[attr-defined]
    elif running_mean is None or running_var is None:
        return None
    norm = Norm(running_mean, running_var, weight, bias, training, momentum, eps)
    for part in norm[:4]:
        if part is not None and part.dtype is not torch.float32:
            return None
    return input._next(False, norm=norm, reached="norm")  # type: ignore[attr-defined]


def _activation(name: str, inplace: bool | None) -> Callable[..., Tensor | None]:
    def stage(input: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        if not _open(input) or input.stages.reached == "activation":  # type: ignore[attr-defined]
            return None
        if input.stages.residual is not None and name not in ("relu", "relu6"):  # type: ignore[attr-defined]
            return None
        writes = inplace if inplace is not None else bool(args[0] if args else kwargs.get("inplace", False))
        return input._next(writes, activation=name, reached="activation")  # type: ignore[attr-defined]

    return stage


def _hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor | None:
    if (min_val, max_val) != (0.0, 6.0):
        return None
    return _activation("relu6", inplace)(input)


def _add(inplace: bool) -> Callable[..., Tensor | None]:
    def stage(left: Any, right: Any, *, alpha: Any = 1, out: Any = None) -> Tensor | None:
        if alpha != 1 or out is not None:
            return None
        block, other = (left, right) if _waits_for_add(left) or inplace else (right, left)
        if not _waits_for_add(block):
            return None
        other = settled(other)
        if not isinstance(other, Tensor) or tuple(other.shape) != tuple(block.seen[0]) or other.dtype != torch.float32:
            return None
        return block._next(inplace, residual=other, reached="add")

    return stage


def _waits_for_add(x: Any) -> bool:
    return _open(x) and x.stages.reached in ("conv", "norm") and x.stages.plan.ends in ("add", "activation")


_STAGES: dict[Any, Callable[..., Tensor | None]] = {
    F.batch_norm: _batch_norm,
    F.relu: _activation("relu", None),
    torch.relu: _activation("relu", False),
    torch.relu_: _activation("relu", True),
    Tensor.relu: _activation("relu", False),
    Tensor.relu_: _activation("relu", True),
    F.relu6: _activation("relu6", None),
    F.hardtanh: _hardtanh,
    F.hardswish: _activation("hardswish", None),
    F.silu: _activation("silu", None),
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
