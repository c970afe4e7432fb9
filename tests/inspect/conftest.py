# SPDX-License-Identifier: Apache-2.0
"""A Python without rich, for reports that must also print there."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture
def no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "rich" or name.startswith("rich.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)  # this makes `import rich` raise an ImportError
