# SPDX-License-Identifier: Apache-2.0
"""Every way from a tensor to a Python number, watched: which file of the package takes it."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import byteback

PACKAGE = str(Path(byteback.__file__).parent)
WAYS = ("tolist", "item", "__int__", "__float__", "__bool__", "__index__", "__contains__", "cpu", "numpy", "nonzero")


def looker(also: tuple[str, ...]) -> str | None:
    """Where the look comes from: None for PyTorch's own, and for a backend's but for the files in `also`."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
    if not frames or ("/ops/" in frames[-1].filename and not frames[-1].filename.endswith(also)):
        return None
    return f"{frames[-1].filename.removeprefix(PACKAGE)}:{frames[-1].lineno} {frames[-1].line}"


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, also: tuple[str, ...] = ()) -> Iterator[Counter[str]]:
    """Counts looks by where they come from; of ops/ only those in the files whose names end with one of `also`."""
    seen: Counter[str] = Counter()
    busy = [False]

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watching(*args: Any, **kwargs: Any) -> Any:
            if not busy[0]:
                busy[0] = True
                try:
                    where = looker(also)
                    if where is not None:
                        seen[f"{name} at {where}"] += 1
                finally:
                    busy[0] = False
            return original(*args, **kwargs)

        patch.setattr(owner, name, watching)

    with monkeypatch.context() as patch:
        for way in WAYS:
            watch(Tensor, way)
        watch(torch, "equal")
        yield seen
