# SPDX-License-Identifier: Apache-2.0
"""How PyTorch sees the operators: schemas, kernels and fake kernels.

Every operator is defined once, in `schema_products.py` or `schema_quantize.py`. Its kernel is the reference or the native
library, whichever path is current; its fake gives the shape, dtype and strides that the kernel will give, so that
`torch.compile` can trace through it. Arguments are checked there and trusted from there on. Plain eager tensors take a short
way past the dispatcher (`eager.py`) to the same kernel; they are all on the CPU. For the others `define` refuses tensors on
different devices, in the kernel and in the fake: PyTorch would leave a result on one of them as it was allocated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from byteback.addresses import same_device
from byteback.ops import eager, native

_library = torch.library.Library("byteback", "DEF")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers one operator, `schema` starting with its name, and returns the function that calls it."""
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    # Integers have no derivative: whatever an operator returns is a constant, and autograd passes by.
    _library.impl(name, torch.no_grad()(_on_one_device(name, kernel)), "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"byteback::{name}", _on_one_device(name, fake), lib=_library)
    operator = getattr(torch.ops.byteback, name)

    def call(*arguments: Any) -> Any:
        return kernel(*arguments) if eager.is_plain(arguments) else operator(*arguments)

    return call


def _on_one_device(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*arguments: Any) -> Any:
        same_device(name, arguments)
        return function(*arguments)

    return checked


def path_of(*tensors: Tensor) -> int | None:
    """The native path that serves these tensors; None for the reference, which takes other devices and empty tensors."""
    native.last_kernel = ""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.numel() == 0:
            return None
    return native.number()


def plainly(function: Callable[..., Any], *arguments: Any) -> Any:
    """A function of plain PyTorch, unseen by autograd. The native kernels need no such care: they return new tensors."""
    with torch.no_grad():
        return function(*arguments)


def check_int8(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int8:
            raise TypeError(
                f"{op}: {name} has dtype {tensor.dtype}, but the product is of int8 integers. "
                "Quantize it first with byteback.ops.quantize."
            )


def check_float(op: str, name: str, x: Tensor, least_rank: int = 2) -> None:
    if x.dtype != torch.float32:
        raise TypeError(f"{op}: {name} has dtype {x.dtype}, but only float32 is quantized. Call .float() on it.")
    if x.dim() < least_rank:
        raise ValueError(
            f"{op}: {name} has shape {tuple(x.shape)}, but it needs an N and a C axis: the noise and the statistics are "
            "defined in N, ..., C order. Reshape it, for example with unsqueeze(0)."
        )


_MOST_PLANS = 4096  # a network has a few hundred; one that sees images of every size would fill the memory


def remembered(plans: dict[tuple[Any, ...], Any], key: tuple[Any, ...], plan: Any) -> Any:
    """A plan that is new, after it was put with the others."""
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan
