# SPDX-License-Identifier: Apache-2.0
"""`byteback bench growth` fills a table for each kind of float that int8 is compared with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from byteback.bench import growth
from byteback.bench.growth import GrowthConfig


@pytest.mark.parametrize("bf16", [False, True])
def test_every_cell_has_its_ratios(bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "tune_malloc", lambda: True)  # which could not be undone in this process
    monkeypatch.setattr(growth.machine, "why_no_bf16", lambda: "" if bf16 else "this CPU has none")
    file = tmp_path / "growth.json"
    config = GrowthConfig("resnet8", batches=(2, 4), images=(8, 16), seconds=1e-6, most_pixels=4 * 8 * 8, json=file)
    console = Console(record=True, width=120)
    growth.run(config, console)
    cells = json.loads(file.read_text())["cells"]
    assert [(cell["batch"], cell["image_size"]) for cell in cells] == [(2, 8), (4, 8)]
    assert all(cell["ratio"] > 0 for cell in cells)
    assert all(cell["ratio_bf16"] > 0 if bf16 else cell["ratio_bf16"] is None for cell in cells)
    said = console.export_text()
    assert "against PyTorch FP32" in said
    assert ("against PyTorch bf16 autocast" in said) is bf16
    assert ("bf16 autocast is left out: this CPU has none" in said) is not bf16
