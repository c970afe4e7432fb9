# SPDX-License-Identifier: Apache-2.0
"""Paths: sets of kernels for CPU tensors, and how to choose one.

    reference   plain PyTorch, on any device: the definition of every operator
    generic     portable C++
    avx2        C++ for x86-64 with AVX2 and FMA
    avx512vnni  the same, with AVX-512 VNNI; functions that gain nothing from it are those of avx2

Every path gives the same bits. By default the fastest path that can run here is used. `with path(...)` or the environment
variable BYTEBACK_PATH (read once) chooses another one. Native paths run CPU tensors only (registry.py).

A `with path(...)` block is thread-local, like torch.no_grad(): a new thread starts without one. Autograd may run a backward
pass in its own threads (one per GPU, another for deeply nested backward passes). They use the path of the thread that called
backward(), because the choice is stored in the thread-local objects that PyTorch passes to them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch._C import _get_obj_in_tls, _is_key_in_tls, _stash_obj_in_tls
from torch.compiler import is_dynamo_compiling

from byteback.ops.backends.cpu import library

PATHS = ("reference", "generic", "avx2", "avx512vnni")  # from the slowest to the fastest
VARIABLE = "BYTEBACK_PATH"

_SHARED = {"avx512vnni": ("avx2/depthwise",)}

_KEY = "byteback_path"  # key of the open blocks of a thread, innermost last, in PyTorch's thread-local objects
_open: list[list[str]] = []  # open blocks of all threads: if it is empty, as usual, thread-local data need not be read


def last_kernel() -> str:
    """Returns the native kernel that ran the last product, such as "avx2/winograd"; empty if another backend ran it."""
    return library.last_kernel


def belongs(kernel: str, path: str) -> bool:
    """Whether a path may use this kernel: its own, or that of another path if it has none.

    >>> belongs("avx2/depthwise", "avx512vnni"), belongs("avx2/winograd", "avx512vnni")
    (True, False)
    """
    return kernel.partition("/")[0] == path or kernel in _SHARED.get(path, ())


def why_not(path: str) -> str:
    """Returns why a path cannot run here; empty if it can.

    >>> why_not("reference")
    ''
    """
    return "" if path == "reference" else library.why_not(path)


def available() -> list[str]:
    """Returns the paths that can run here, fastest first."""
    return [path for path in reversed(PATHS) if not why_not(path)]


_best = available()[0]


def current() -> str:
    """Returns the path of the next operator on CPU tensors."""
    chosen = _open and _chosen()
    return chosen[-1][0] if chosen else _default()


def _chosen() -> Sequence[list[str]]:
    """Returns the open blocks of this thread."""
    if is_dynamo_compiling():  # it cannot trace thread-local data, so the open blocks of all threads are used
        return _open
    found: tuple[list[str], ...] = _get_obj_in_tls(_KEY) if _is_key_in_tls(_KEY) else ()
    return found


@functools.cache
def _default() -> str:
    """Returns the path outside `with path(...)`. Cached, as reading the environment takes longer than a small kernel."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return _best
    _check(asked, f"{VARIABLE} is set to {asked!r}. Unset it to fall back to {_best!r}.")
    return asked


def is_chosen() -> bool:
    """Whether a `with path(...)` block is open. Then all products run in int8 on that path and none falls back to float."""
    return bool(_open and _chosen())


def number() -> int | None:
    """Returns the number of the current path in the native library; None for the reference."""
    return library.NUMBERS.get(current())


@contextmanager
def path(name: str) -> Iterator[None]:
    """Runs every operator in the block on one path. No product falls back to float.

    The block applies to this thread, and to a backward pass that is called in it. Other threads need their own blocks.

    >>> with path("reference"):
    ...     current()
    'reference'
    """
    _check(name, f"path({name!r}) was called. Leave it out to use {_best!r}.")
    block = [name]  # a list has an identity: two asyncio tasks may have overlapping blocks with the same name
    _stash_obj_in_tls(_KEY, (*_chosen(), block))
    _open.append(block)
    try:
        yield
    finally:
        _open.remove(block)  # this one or an equal one; atomic, because other threads may change the list
        _stash_obj_in_tls(_KEY, tuple(other for other in _chosen() if other is not block))


def _check(name: str, asked: str) -> None:
    if name not in PATHS:
        raise ValueError(f"path: unknown path {name!r}; choose one of {', '.join(PATHS)}. {asked}")
    if why_not(name):
        reasons = "\n".join(f"  {p:<10} : {why_not(p) or 'can run'}" for p in reversed(PATHS))
        raise RuntimeError(f"no kernel can run on path {name!r} here.\n{reasons}\n  {asked}        (details: byteback doctor)")
