# SPDX-License-Identifier: Apache-2.0
"""Runs of the trainer that take a second: digits in this process, and folders of pictures."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from rich.console import Console

from byteback.train import side_by_side
from byteback.train.checkpoints.files import read_lines
from byteback.train.config_file import from_command_line

SMALL = ("--no-tensorboard", "--histogram-every", "0", "--batch-size", "720", "--threads", "1")


def train(*args: str) -> tuple[int, str]:
    """`byteback train` within this process: its exit code, and what it prints."""
    console = Console(file=io.StringIO(), width=200, markup=False)
    code = side_by_side.run(from_command_line(args), console)
    return code, console.file.getvalue()  # type: ignore[attr-defined]


def ends(run: Path) -> list[str]:
    return [read_lines(file)[-1].get("state_sha256", "") for file in sorted(run.glob("*/seed0/metrics.jsonl"))]


def picture_folder(root: Path, images: int = 48) -> Path:
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(images):
        place = root / ("val" if number % 8 > 5 else "train") / ("cat" if number % 2 else "dog") / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (12, 12, 3), dtype=np.uint8)).save(place)
    return root
