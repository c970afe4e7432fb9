# SPDX-License-Identifier: Apache-2.0
"""Paths: which set of kernels runs, and why. Loads the native library; the only place that decides.

    reference   plain PyTorch, on any device: the meaning of every operator
    generic     portable C++
    avx2        C++ for x86-64 with AVX2 and FMA
    avx512vnni  the same, with matrix products and Winograd by AVX-512 VNNI

Every path gives the same bits. Without a word from the user the best path that can run here is taken; `with path(...)` or
the environment variable BYTEBACK_PATH (read once) choose another one. avx512vnni is tried on small products and
on sums as deep as an int32 holds before it is first used, and refused with a warning if a bit differs. The native paths serve CPU tensors; tensors
elsewhere are served by the reference.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

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

_chosen: list[str] = []  # by `with path(...)`, innermost last
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
    return _chosen[-1] if _chosen else _default()


@functools.cache
def _default() -> str:
    """What runs without a `with path(...)`: asking the environment at every call would cost more than a small kernel."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return _best
    _check(asked, f"{VARIABLE} is set to {asked!r}. Unset it to fall back to {_best!r}.")
    return asked


def is_chosen() -> bool:
    """Whether a `with path(...)` block is open: then every product runs in int8 on that path, float serves none."""
    return bool(_chosen)


def number() -> int | None:
    """The current path as the native library counts; None for the reference."""
    return _NUMBERS.get(current())


@contextmanager
def path(name: str) -> Iterator[None]:
    """Runs every operator on one path, in this process, for as long as the block lasts; float serves no product in it.

    >>> with path("reference"):
    ...     current()
    'reference'
    """
    _check(name, f"path({name!r}) was asked for. Leave it out to use {_best!r}.")
    _chosen.append(name)
    try:
        yield
    finally:
        _chosen.pop()


def _check(name: str, asked: str) -> None:
    if name not in PATHS:
        raise ValueError(f"path: {name!r} is unknown; there are {', '.join(PATHS)}. {asked}")
    if why_not(name):
        reasons = "\n".join(f"  {p:<10} : {why_not(p) or 'can run'}" for p in reversed(PATHS))
        raise RuntimeError(f"no kernel can run on path {name!r} here.\n{reasons}\n  {asked}        (details: byteback doctor)")
