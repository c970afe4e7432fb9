# SPDX-License-Identifier: Apache-2.0
"""Paths: which set of kernels runs CPU tensors, and how a user chooses another one.

    reference   plain PyTorch, on any device: the meaning of every operator
    generic     portable C++
    avx2        C++ for x86-64 with AVX2 and FMA
    avx512vnni  the same with AVX-512 VNNI; what gains nothing from it is avx2's

Every path gives the same bits. By default the fastest path that can run here is used; `with path(...)` or the environment
variable BYTEBACK_PATH (read once) choose another one. Native paths run CPU tensors only (registry.py).

A `with path(...)` block belongs to the thread that opens it, as torch.no_grad() does: a thread that the user starts begins
without one. Autograd may run a backward pass in threads of its own (one per GPU, another where backward passes nest deeply).
They use the path of the thread that called backward(), because the choice is kept among the thread-local objects that
PyTorch hands on to them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch._C import _get_obj_in_tls, _is_key_in_tls, _stash_obj_in_tls
from torch.compiler import is_dynamo_compiling

from byteback.ops.backends.cpu import library

PATHS = ("reference", "generic", "avx2", "avx512vnni")  # from the plainest to the fastest
VARIABLE = "BYTEBACK_PATH"

_SHARED = {"avx512vnni": ("avx2/depthwise",)}

_KEY = "byteback_path"  # of a thread's open blocks, innermost last, among PyTorch's thread-local objects
_open: list[list[str]] = []  # the blocks that are open in any thread: most of the time none, and nothing need be looked up


def last_kernel() -> str:
    """The native kernel that ran the last product, such as "avx2/winograd"; empty if another backend ran it."""
    return library.last_kernel


def belongs(kernel: str, path: str) -> bool:
    """Whether a path may use this kernel: its own, or one that it shares because it has none of its own.

    >>> belongs("avx2/depthwise", "avx512vnni"), belongs("avx2/winograd", "avx512vnni")
    (True, False)
    """
    return kernel.partition("/")[0] == path or kernel in _SHARED.get(path, ())


def why_not(path: str) -> str:
    """Why a path cannot run here; empty if it can.

    >>> why_not("reference")
    ''
    """
    return "" if path == "reference" else library.why_not(path)


def available() -> list[str]:
    """The paths that can run here, fastest first."""
    return [path for path in reversed(PATHS) if not why_not(path)]


_best = available()[0]


def current() -> str:
    """The path of the next operator on CPU tensors."""
    chosen = _open and _chosen()
    return chosen[-1][0] if chosen else _default()


def _chosen() -> Sequence[list[str]]:
    """The blocks that this thread is in."""
    if is_dynamo_compiling():  # it cannot follow thread-local data: what is open in any thread counts
        return _open
    found: tuple[list[str], ...] = _get_obj_in_tls(_KEY) if _is_key_in_tls(_KEY) else ()
    return found


@functools.cache
def _default() -> str:
    """What runs without a `with path(...)`: asking the environment at every call would cost more than a small kernel."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return _best
    _check(asked, f"{VARIABLE} is set to {asked!r}. Unset it to fall back to {_best!r}.")
    return asked


def is_chosen() -> bool:
    """Whether a `with path(...)` block is open here: then every product runs in int8 on that path, none falls back to float."""
    return bool(_open and _chosen())


def number() -> int | None:
    """The current path as the native library counts; None for the reference."""
    return library.NUMBERS.get(current())


@contextmanager
def path(name: str) -> Iterator[None]:
    """Runs every operator on one path inside the block; no product falls back to float in it.

    The block counts in this thread, and in a backward pass that is called in it. Other threads open blocks of their own.

    >>> with path("reference"):
    ...     current()
    'reference'
    """
    _check(name, f"path({name!r}) was asked for. Leave it out to use {_best!r}.")
    block = [name]  # a list, to be known from another one of the same name: blocks of two tasks of asyncio may overlap
    _stash_obj_in_tls(_KEY, (*_chosen(), block))
    _open.append(block)
    try:
        yield
    finally:
        _open.remove(block)  # this one or an equal one; in one step, as other threads may be at it
        _stash_obj_in_tls(_KEY, tuple(other for other in _chosen() if other is not block))


def _check(name: str, asked: str) -> None:
    if name not in PATHS:
        raise ValueError(f"path: {name!r} is unknown; there are {', '.join(PATHS)}. {asked}")
    if why_not(name):
        reasons = "\n".join(f"  {p:<10} : {why_not(p) or 'can run'}" for p in reversed(PATHS))
        raise RuntimeError(f"no kernel can run on path {name!r} here.\n{reasons}\n  {asked}        (details: byteback doctor)")
