# SPDX-License-Identifier: Apache-2.0
"""Paths: which set of kernels runs, and why. Loads the native library; the only place that decides.

    reference   plain PyTorch, on any device: the meaning of every operator
    generic     portable C++
    avx2        C++ for x86-64 with AVX2 and FMA
    avx512vnni  the same, with matrix products and Winograd by AVX-512 VNNI

Every path gives the same bits. Without a word from the user the best path that can run here is taken; `with path(...)` or
the environment variable BYTEBACK_PATH (read once) choose another one. avx512vnni is tried on small products and on sums as
deep as an int32 holds before it is first used, and refused with a warning if a bit differs. The native paths serve CPU
tensors; tensors elsewhere are served by the reference.

A `with path(...)` block belongs to the thread that opens it, as torch.no_grad() does: a thread that the user starts begins
without one. Autograd may run a backward pass in threads of its own (one per GPU, another where backward passes nest deeply).
They take the path of the thread that called backward(), because the choice is kept among the thread-local objects that
PyTorch hands on to them.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from torch._C import _get_obj_in_tls, _is_key_in_tls, _stash_obj_in_tls
from torch.compiler import is_dynamo_compiling

try:
    library: ModuleType | None = importlib.import_module("byteback._native")
    _load_error = ""
except ImportError as error:
    library = None
    _load_error = str(error)

PATHS = ("reference", "generic", "avx2", "avx512vnni")  # from the plainest to the fastest
VARIABLE = "BYTEBACK_PATH"
_NUMBERS = {"generic": 0, "avx2": 1, "avx512vnni": 2}  # enum class Path in csrc/path.h

_SHARED = {"avx512vnni": ("avx2/depthwise",)}
_SELF_CHECKED = ("avx512vnni",)  # no machine of the project's tests is sure to have it

_KEY = "byteback_path"  # of a thread's open blocks, innermost last, among PyTorch's thread-local objects
_open: list[list[str]] = []  # the blocks that are open in any thread: most of the time none, and nothing need be looked up
last_kernel = ""
"""The native kernel that served the last product, such as "avx2/winograd"; empty after the reference."""


def belongs(kernel: str, path: str) -> bool:
    """Whether a path may let this kernel serve: its own, or one that it shares because it has none of its own.

    >>> belongs("avx2/depthwise", "avx512vnni"), belongs("avx2/winograd", "avx512vnni")
    (True, False)
    """
    return kernel.partition("/")[0] == path or kernel in _SHARED.get(path, ())


def why_not(path: str) -> str:
    """Why a path cannot run here; empty where it can.

    >>> why_not("reference")
    ''
    """
    if path == "reference":
        return ""
    if library is None:
        return f"this build has no native library ({_load_error})"
    if not library.is_compiled(_NUMBERS[path]):
        return "not compiled into this build"
    if not library.cpu_supports(_NUMBERS[path]):
        return f"this CPU lacks {path}"
    if path in _SELF_CHECKED:
        return _self_check(path)
    return ""


@functools.cache
def _self_check(path: str) -> str:
    """Why a path that could run must not, found once by comparing it with the generic one; empty if all is well."""
    assert library is not None
    found = library.self_check(_NUMBERS[path])
    if not found:
        return ""
    warnings.warn(
        f"byteback: path {path!r} is not used, because its self-check failed on this machine: {found}. Results stay right, on "
        "a slower path. Please report this with the output of `byteback doctor`.",
        RuntimeWarning,
        stacklevel=2,
    )
    return f"its self-check failed here: {found}"


def available() -> list[str]:
    """The paths that can run here, fastest first."""
    return [path for path in reversed(PATHS) if not why_not(path)]


_best = available()[0]


def current() -> str:
    """The path that the next operator takes."""
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
    """Whether a `with path(...)` block is open here: then every product runs in int8 on that path, float serves none."""
    return bool(_open and _chosen())


def number() -> int | None:
    """The current path as the native library counts; None for the reference."""
    return _NUMBERS.get(current())


@contextmanager
def path(name: str) -> Iterator[None]:
    """Runs every operator on one path for as long as the block lasts; float serves no product in it.

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
