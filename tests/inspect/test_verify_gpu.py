# SPDX-License-Identifier: Apache-2.0
"""`byteback verify --gpu` and `bench step --device` without a GPU: the comparison itself, and clear messages."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from byteback.bench import gpu_step, step
from byteback.bench.training_step import Setting
from byteback.inspect import doctor, verify, verify_gpu
from byteback.ops.backends import reference


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_comparison_accepts_equal_bits_and_names_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verify_gpu.compare(torch.device("cpu"), 2, 0) == []
    monkeypatch.setattr(reference, "absmax", lambda x, axis: x.abs().amax() + 1)
    assert "absmax differs in case 0, seed 0" in verify_gpu.compare(torch.device("cpu"), 1, 0)[0]


def test_without_a_gpu_verify_fails_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.run(verify.VerifyConfig(gpu=True), Console(width=200)) is False
    assert "sees no GPU" in capsys.readouterr().out


def test_the_doctor_says_that_there_is_none() -> None:
    assert doctor.gpu_rows()[0][0] == "none"


def test_bench_step_says_that_there_is_none() -> None:
    with pytest.raises(ValueError, match="sees no GPU"):
        gpu_step.run(step.StepConfig(device="cuda"), Console())


def test_the_sides_take_turns() -> None:
    times = gpu_step.measure(Setting("resnet20", 8, 2, "unified-int8"), torch.device("cpu"), 1)
    assert {name: len(own) for name, own in times.items()} == {"TF32": 1, "bf16": 1, "int8": 1}
