# SPDX-License-Identifier: Apache-2.0
"""Registers the operators with PyTorch, and calls kernels without its dispatcher where possible.

`define` registers an operator: its schema, its kernel, and its fake kernel, which returns a tensor with the shape, dtype and
strides of the result, so that `torch.compile` can trace it. The function that it returns calls the kernel directly for plain
eager tensors, because a call through the dispatcher takes some 30 µs, more than the kernel of a small layer. The dispatcher is
needed if something else intercepts the call: a subclass, a mode, a transform, a tracer, the profiler, autocast or another
device. This is decided by the dispatch keys of the tensors and of the thread: all must be those of an ordinary CPU tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from byteback.ops.backends.registry import same_device

_library = torch.library.Library("byteback", "DEF")

# Looked up once: after a large layer every attribute look-up in PyTorch's modules is a cache miss.
_compiling = torch.compiler.is_compiling
_keys_of = torch._C._dispatch_keys
_keys_of_thread = torch._C._dispatch_tls_local_include_set
_function_mode = torch._C._is_torch_function_mode_enabled
_profiling = torch._C._autograd._profiler_enabled

_TENSORS = frozenset({Tensor, Parameter})
_CONSTANTS = frozenset({int, bool, list, tuple, torch.Size, type(None)})


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers an operator and returns the function that calls it. `schema` starts with the name of the operator.

    The kernel and the fake kernel raise an error if tensors are on different devices: PyTorch would return an uninitialized
    result on one of them. (Calls without the dispatcher only have CPU tensors.)
    """
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    # Integers have no derivative: the results are constants, and autograd does not record the operator.
    _library.impl(name, torch.no_grad()(_on_one_device(name, kernel)), "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"byteback::{name}", _on_one_device(name, fake), lib=_library)
    operator = getattr(torch.ops.byteback, name)

    def call(*arguments: Any) -> Any:
        return kernel(*arguments) if is_plain(arguments) else operator(*arguments)

    return call


def _on_one_device(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*arguments: Any) -> Any:
        same_device(name, arguments)
        return function(*arguments)

    return checked


def _ordinary() -> tuple[frozenset[int], frozenset[int]]:
    """Returns the dispatch keys of ordinary CPU tensors and of ordinary threads, inside and outside of inference mode."""
    tensors, threads = set(), set()
    for inference in (False, True):
        with torch.inference_mode(inference):
            # On the CPU, whatever torch.set_default_device says: otherwise tensors of another device would count as plain.
            tensors.add(_keys_of(torch.empty(0, device="cpu")).raw_repr())
            threads.add(_keys_of_thread().raw_repr())
    return frozenset(tensors), frozenset(threads)


_PLAIN_TENSOR, _PLAIN_THREAD = _ordinary()


def is_plain(arguments: tuple[Any, ...]) -> bool:
    """Whether an operator with these arguments may be called without the dispatcher.

    >>> is_plain((torch.zeros(2), 1)), is_plain((torch.zeros(2, device="meta"), 1))
    (True, False)
    """
    # torch.compile evaluates the first condition while it traces, and does not trace the rest.
    if _compiling() or _function_mode() or _profiling():
        return False
    if _keys_of_thread().raw_repr() not in _PLAIN_THREAD:
        return False
    for argument in arguments:
        kind = type(argument)
        if kind in _TENSORS:
            if _keys_of(argument).raw_repr() not in _PLAIN_TENSOR:
                return False
        elif kind not in _CONSTANTS:
            return False
    return True


_MOST_PLANS = 4096  # a network has a few hundred; with images of many sizes plans would fill the memory


def remembered(plans: dict[tuple[Any, ...], Any], key: tuple[Any, ...], plan: Any) -> Any:
    """Stores a new plan in `plans` and returns it."""
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan
