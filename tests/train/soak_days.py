# SPDX-License-Identifier: Apache-2.0
"""What test_soak.py starts: the trainer for 10,000 steps of images whose size changes, watched from inside."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import byteback
from byteback.nn.layers import float_table
from byteback.train import loop
from byteback.train.config import TrainConfig
from byteback.train.data import Data
from byteback.train.interrupt import Stop
from byteback.train.variants import parse

STEPS, EVERY, PER_EPOCH = 10_000, 50, 500
SIZES = range(8, 33, 4)  # 49 shapes of images: what is kept for each of them is there after 2,000 steps


class Changing:
    """Pictures of noise. Each batch has another size, and its last one fewer images."""

    def __init__(self, images: int) -> None:
        self.images = images

    def __len__(self) -> int:
        return self.images

    def batches(self, chosen: Sequence[Tensor], seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        draw = random.Random(f"{seed} {epoch}")
        for index in chosen:
            height, width = draw.choice(SIZES), draw.choice(SIZES)
            images = torch.randn(len(index), 3, height, width).contiguous(memory_format=torch.channels_last)
            yield images, index % 10

    def close(self) -> None:
        pass


def status(name: str) -> int:
    """A line of /proc/self/status: VmRSS in KiB, or Threads."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


class Watch:
    """The listener of the loop."""

    def __init__(self) -> None:
        self.resident: list[tuple[int, int]] = []
        self.threads: list[int] = []
        self.files: list[int] = []

    def on_step(self, progress: Any, loss: float, steps: int, model: Any) -> None:
        if progress.step % EVERY == 0:
            self.resident.append((progress.step, status("VmRSS") * 1024))
            self.threads.append(status("Threads"))
            self.files.append(len(os.listdir("/proc/self/fd")))

    def on_epoch(self, record: dict[str, Any]) -> None:
        pass

    def say(self, text: str) -> None:
        pass


def main(recipe: str, folder: Path) -> None:
    byteback.tune_malloc()
    torch.set_num_threads(2)
    float_table.RULES = ()  # small layers in int8, too
    batch = 4
    train = Changing(batch * PER_EPOCH - 1)
    data = Data("changing", 10, 32, 3, train, Changing(40))
    epochs = STEPS // PER_EPOCH
    config = TrainConfig(
        data="digits", model="resnet8", image_size=32, epochs=epochs, batch_size=batch, lr=0.01, threads=2, recipe=(recipe,)
    )
    config = config.__class__(**{**vars(config), "checkpoint_seconds": 1.0, "histogram_every": 5, "output_dir": str(folder)})
    watch = Watch()
    with Stop() as stop, stop.training():
        loop.train(config, loop.Member(parse(recipe), 0, folder / recipe), data, watch, stop)
    print(json.dumps(vars(watch)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
