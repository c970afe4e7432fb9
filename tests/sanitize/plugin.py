# SPDX-License-Identifier: Apache-2.0
"""A plugin for pytest: byteback._native is the sanitized library, and the run ends with what was clean."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from sanitize.build import library

_native = library()
assert _native is not None, "build it first: make sanitize"
_spec = importlib.util.spec_from_file_location("byteback._native", _native)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["byteback._native"] = _module
_spec.loader.exec_module(_module)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from byteback.ops.backends import paths  # after the library took its place
    from byteback.ops.backends.cpu import library as loaded

    assert loaded.native is _module
    counts = {name: len(terminalreporter.getreports(name)) for name in ("passed", "failed", "error")}
    names = ", ".join(reversed(paths.available()))
    if counts["failed"] or counts["error"]:
        terminalreporter.write_line(f"{counts['failed'] + counts['error']} tests fail under ASan and UBSan")
    else:
        terminalreporter.write_line(f"{counts['passed']:,} tests clean under ASan and UBSan on paths {names}")
