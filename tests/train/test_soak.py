# SPDX-License-Identifier: Apache-2.0
"""10,000 steps with images of changing sizes: memory stays flat, and no thread or file is left open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from byteback.train.checkpoints.files import read_lines

WARM_UP = 3000  # steps until every size has come, and the allocator has its blocks
MOST = 500.0  # bytes per step: 5 MB in 10,000 steps


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["unified-int8", "distribution-adaptive-int8"])
def test_ten_thousand_steps_of_changing_sizes(recipe: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("soak_days.py")
    done = subprocess.run(
        [sys.executable, str(script), recipe, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=3000,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr
    end = read_lines(tmp_path / recipe / "metrics.jsonl")[-1]
    assert end["kind"] == "end" and end["step"] == 10_000
    found = json.loads(done.stdout)
    steps, resident = np.array([sample for sample in found["resident"] if sample[0] > WARM_UP], dtype=float).T
    slope, _ = np.polyfit(steps, resident, 1)
    print(f"{recipe}: {slope:.0f} bytes per step, {resident.mean() / 2**20:.0f} MiB, {found['threads'][-1]} threads")
    assert slope < MOST
    assert len({*found["threads"][1:]}) == 1, found["threads"]
    assert max(found["files"]) == min(found["files"]), found["files"]
