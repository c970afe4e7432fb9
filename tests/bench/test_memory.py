# SPDX-License-Identifier: Apache-2.0
"""`byteback bench memory`: processes that have done nothing before, and parts that add up to the peak."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from byteback.bench import memory
from byteback.bench.memory import MemoryConfig
from byteback.bench.step import run_job
from byteback.bench.step_worker import Job
from byteback.bench.training_step import Setting, Variant

TINY = Setting("resnet8", 8, 4, "unified-int8")


@pytest.mark.parametrize("side", ["int8", "fp32"])
def test_a_worker_explains_its_peak(side: Any) -> None:
    result = run_job(Job("memory", TINY, rounds=1, variant=Variant(side, True)), lambda *_: None)
    parts = result["parts"]
    assert len(result["losses"]) == 1 and "default" in result["malloc"]
    assert (parts["int8 weights"] > 0) == (side == "int8")
    assert parts["optimizer state"] == parts["gradients"] <= parts["parameters and buffers"]
    if result["peak"] is not None:
        assert sum(parts.values()) == result["peak"] > 0


def test_both_sides_are_shown_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = {
        "fp32": {"parts": {"gradients": 4 << 20}, "peak": 8 << 20},
        "int8": {"parts": {"gradients": 4 << 20}, "peak": 2 << 20},
    }
    seen: list[Job] = []

    def answer(job: Job, on_progress: object) -> object:
        seen.append(job)
        assert job.variant is not None
        return made[job.variant.numbers]

    monkeypatch.setattr(memory, "run_job", answer)
    text, file = io.StringIO(), tmp_path / "memory.json"
    memory.run(MemoryConfig(model="resnet20", batch=2, steps=3, json=file), Console(file=text, width=200))
    assert [job.rounds for job in seen] == [3, 3] and not any(job.tuned_malloc for job in seen)
    last = next(line for line in text.getvalue().splitlines() if "peak" in line and "8.0" in line)
    assert last.split()[-3:] == ["8.0", "2.0", "0.25"]
    assert json.loads(file.read_text())["int8"]["peak"] == 2 << 20
    made["int8"]["peak"] = None  # type: ignore[assignment]
    memory.run(MemoryConfig(model="resnet20", batch=2), Console(file=text, width=200))
    assert "unknown" in text.getvalue()


def test_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="steps is 0"):
        MemoryConfig(steps=0).setting()
