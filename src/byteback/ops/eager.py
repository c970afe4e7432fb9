# SPDX-License-Identifier: Apache-2.0
"""The short way: plain eager tensors go from our checks to the kernel without PyTorch's dispatcher.

Through the dispatcher and Python and back a call costs some 30 µs, more than the kernel of a small layer. It is needed
where somebody listens in: a subclass, a mode, a transform, a tracer, the profiler, autocast, another device. Which keys
listen is written in a tensor's key set and in the thread's; both must be those of an ordinary CPU tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

# Bound once: after a large layer every look-up in PyTorch's modules is a miss of the cache.
_compiling = torch.compiler.is_compiling
_keys_of = torch._C._dispatch_keys
_keys_of_thread = torch._C._dispatch_tls_local_include_set
_function_mode = torch._C._is_torch_function_mode_enabled
_profiling = torch._C._autograd._profiler_enabled

_TENSORS = frozenset({Tensor, Parameter})
_CONSTANTS = frozenset({int, bool, list, tuple, torch.Size, type(None)})


def _ordinary() -> tuple[frozenset[int], frozenset[int]]:
    """The key sets of CPU tensors and of threads to which nothing was added, within inference mode and without."""
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
