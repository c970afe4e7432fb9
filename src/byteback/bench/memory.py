# SPDX-License-Identifier: Apache-2.0
"""`byteback bench memory`: the peak memory of training a network, in int8 against PyTorch FP32, part by part.

Each side trains a few steps in a new process with default malloc, channels_last. The peak is the highest resident memory of
that process less what it was after the imports, as the system counts it (VmHWM).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from byteback import tables
from byteback.bench.step import StepConfig, run_job
from byteback.bench.step_worker import Job
from byteback.bench.training_step import Setting, Variant


@dataclass(frozen=True)
class MemoryConfig:
    """Measure the peak memory of training a network in int8 and in PyTorch FP32, and what it consists of."""

    model: str = "resnet18"
    """Name of the network, as in `byteback bench step`."""
    image_size: int | None = None
    """Pixels of a side. The default depends on the network."""
    batch: int | None = None
    """Images per step. The default depends on the network."""
    recipe: str = "unified-int8"
    """Name of the recipe, as in `byteback bench step`."""
    steps: int = 5
    """Training steps in each process."""
    json: Path | None = None
    """Write the results to this file."""

    def setting(self) -> Setting:
        """Checks the flags."""
        if self.steps < 1:
            raise ValueError(f"bench memory: steps is {self.steps}; it must be at least 1. Remove it to use the default.")
        return StepConfig(self.model, self.image_size, self.batch, self.recipe, self.json).setting()


def run(config: MemoryConfig, console: Console) -> None:
    """Runs the command."""
    setting = config.setting()
    sides = {"float32": Variant("fp32", True), "int8": Variant("int8", True)}
    results: dict[str, Any] = {}
    with console.status("starting") as status:
        for name, variant in sides.items():
            job = Job("memory", setting, variant=variant, rounds=config.steps)
            results[name] = run_job(job, lambda done, total, text: status.update(f"{text}: step {done}"))
    console.print(table(setting, results))
    if config.json:
        config.json.write_text(json.dumps({**setting.__dict__, **results}, indent=2) + "\n")


def table(setting: Setting, results: dict[str, Any]) -> Any:
    """Returns the parts of both peaks side by side."""
    fp32, int8 = results["float32"], results["int8"]
    parts = {name: (fp32["parts"][name], int8["parts"][name]) for name in fp32["parts"]}
    parts["peak"] = (fp32["peak"], int8["peak"])
    rows = [[name, *map(_megabytes, pair), _ratio(*pair)] for name, pair in parts.items()]
    title = f"{setting.model}, {setting.image_size} pixels, batch {setting.batch}, {setting.recipe}: peak of training, MB"
    return tables.build(title, ["part", "float32", "int8", "int8 / float32"], rows)


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**20:.1f}"


def _ratio(fp32: int | None, int8: int | None) -> str:
    return f"{int8 / fp32:.2f}" if fp32 and int8 is not None else ""
