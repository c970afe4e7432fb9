# SPDX-License-Identifier: Apache-2.0
"""Loads the native library and checks which of its paths can run on this machine.

Before its first use, avx512vnni is compared with the generic path on small products, on the longest sums that fit into int32,
and on elementwise functions of small tensors. If a bit differs, the path is not used and a warning is given.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

native: Any
try:
    native = importlib.import_module("byteback._native")
    _load_error = ""
except ImportError as error:
    native = None
    _load_error = str(error)

NUMBERS = {"generic": 0, "avx2": 1, "avx512vnni": 2}  # enum class Path in csrc/core/path.h
_SELF_CHECKED = ("avx512vnni",)  # the machines that run the project's tests may not have it

last_kernel = ""
"""The native kernel that ran the last product, such as "avx2/winograd"; empty if another backend ran it."""


def why_not(path: str) -> str:
    """Returns why a native path cannot run here; empty if it can."""
    if native is None:
        return f"this build has no native library ({_load_error})"
    if not native.is_compiled(NUMBERS[path]):
        return "not compiled into this build"
    if not native.cpu_supports(NUMBERS[path]):
        return f"this CPU lacks {path}"
    return self_check(path) if path in _SELF_CHECKED else ""


@functools.cache
def self_check(path: str) -> str:
    """Compares a path with the generic one, once. Returns why it must not be used; empty if all bits are equal."""
    found: str = native.self_check(NUMBERS[path])
    if not found:
        return ""
    warnings.warn(
        f"byteback: path {path!r} is not used, because its self-check failed on this machine: {found}. A slower path "
        "is used, with correct results. Please report this with the output of `byteback doctor`.",
        RuntimeWarning,
        stacklevel=2,
    )
    return f"its self-check failed here: {found}"
