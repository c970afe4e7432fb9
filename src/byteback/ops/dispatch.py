# SPDX-License-Identifier: Apache-2.0
"""How PyTorch sees the operators, and the short way past its dispatcher.

`define` registers an operator once: its schema, its kernel, and its fake, which gives the shape, dtype and strides that the
kernel will give, so that `torch.compile` can trace through it. The function that it returns calls the kernel directly for
plain eager tensors: through the dispatcher and Python and back a call costs some 30 µs, more than the kernel of a small layer.
The dispatcher is needed where something else intercepts the call: a subclass, a mode, a transform, a tracer, the profiler,
autocast, another device. A tensor's key set and the thread's tell; both must be those of an ordinary CPU tensor.
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

# Bound once: after a large layer every look-up in PyTorch's modules is a miss of the cache.
_compiling = torch.compiler.is_compiling
_keys_of = torch._C._dispatch_keys
_keys_of_thread = torch._C._dispatch_tls_local_include_set
_function_mode = torch._C._is_torch_function_mode_enabled
_profiling = torch._C._autograd._profiler_enabled

_TENSORS = frozenset({Tensor, Parameter})
_CONSTANTS = frozenset({int, bool, list, tuple, torch.Size, type(None)})


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers one operator, `schema` starting with its name, and returns the function that calls it.

    Tensors on different devices are refused in the kernel and in the fake: PyTorch would leave a result on one of them as it
    was allocated. (Tensors that take the short way are all on the CPU.)
    """
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    # Integers have no derivative: whatever an operator returns is a constant, and autograd passes by.
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
    """The key sets of CPU tensors and of threads to which nothing was added, inside inference mode and outside."""
    tensors, threads = set(), set()
    for inference in (False, True):
        with torch.inference_mode(inference):
            # On the CPU, whatever torch.set_default_device says: else tensors of another device would count as plain.
            tensors.add(_keys_of(torch.empty(0, device="cpu")).raw_repr())
            threads.add(_keys_of_thread().raw_repr())
    return frozenset(tensors), frozenset(threads)


_PLAIN_TENSOR, _PLAIN_THREAD = _ordinary()


def is_plain(arguments: tuple[Any, ...]) -> bool:
    """Whether an operator with these arguments may be called past the dispatcher.

    >>> is_plain((torch.zeros(2), 1)), is_plain((torch.zeros(2, device="meta"), 1))
    (True, False)
    """
    # torch.compile answers the first question while it traces, and never sees the rest.
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


_MOST_PLANS = 4096  # a network has a few hundred; one that sees images of every size would fill the memory


def remembered(plans: dict[tuple[Any, ...], Any], key: tuple[Any, ...], plan: Any) -> Any:
    """A new plan, after it was stored with the others."""
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan
