# SPDX-License-Identifier: Apache-2.0
"""`byteback bench inference`: a frozen and an unfrozen network against float32."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from byteback.bench import inference
from byteback.bench.inference import InferenceConfig


def test_frozen_and_unfrozen_are_timed_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(inference, "_TURN", 0.0)
    file = tmp_path / "times.json"
    console = Console(file=io.StringIO(), width=200)
    inference.run(InferenceConfig(("resnet8",), (1, 2), image_size=8, seconds=0.0, json=file), console)
    rows = json.loads(file.read_text())
    assert [(row["model"], row["image_size"], row["batch"]) for row in rows] == [("resnet8", 8, 1), ("resnet8", 8, 2)]
    for row in rows:
        assert all(row[name] > 0 for name in ("fp32_ms", "frozen_ms", "unfrozen_ms", "frozen", "unfrozen"))
    assert "unfrozen ms" in console.file.getvalue()


def test_the_first_pass_of_a_turn_does_not_count() -> None:
    times = iter([50.0, 10.0, 12.0, 14.0, 99.0])
    assert inference._turn(lambda: next(times)) == 12.0
    assert next(times) == 99.0
