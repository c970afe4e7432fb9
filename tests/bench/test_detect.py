# SPDX-License-Identifier: Apache-2.0
"""`byteback bench detect` times what it says, on noise and for both kinds of detectors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from byteback.bench.detect import DetectConfig, run


@pytest.mark.parametrize("model", ["retinanet_resnet50_fpn", "fasterrcnn_resnet50_fpn", "ssdlite320_mobilenet_v3_large"])
def test_every_side_has_both_times(model: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    config = DetectConfig(model, recipes=("unified-int8",), image_size=32, batch_size=2, rounds=1, json=file)
    console = Console(record=True, width=120)
    run(config, console)
    sides = json.loads(file.read_text())
    assert [side["side"] for side in sides] == ["float32 contiguous", "float32 channels_last", "unified-int8"]
    assert all(side[key] > 0 for side in sides for key in ("step_ms", "network_ms", "step_ratio", "network_ratio"))
    assert "network ms" in console.export_text()


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        run(DetectConfig(rounds=0), Console())
