# SPDX-License-Identifier: Apache-2.0
"""A split on disk, read by worker processes: images, clips, or images with boxes.

The random state for the augmentation of an item is made from (seed, epoch, index). So the contents of a batch do not depend on
the number of workers, nor on the step where an epoch is resumed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


@dataclass(frozen=True)
class Unreadable:
    """What a worker returns instead of an item. An exception would be shown with a long traceback."""

    why: str


class FromDisk:
    """`dataset` returns an item, or Unreadable, for a key (seed, epoch, index). `collate` makes a batch of a list of items."""

    def __init__(self, dataset: Dataset[Any], workers: int, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.workers, self.collate = dataset, workers, collate

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batches(self, chosen: Sequence[Tensor], seed: int, epoch: int) -> Iterator[Any]:
        keys = [[(seed, epoch, index) for index in batch.tolist()] for batch in chosen]
        loader: DataLoader[Any] = DataLoader(
            *(self.dataset,),
            batch_sampler=keys,
            num_workers=min(self.workers, len(keys)),
            collate_fn=self._batch,
            worker_init_fn=_leave_signals_to_the_parent,
            generator=torch.Generator(),  # else it would use the default generator, which dropout and samplers of detectors use
        )
        for batch in loader:
            if isinstance(batch, Unreadable):
                raise ValueError(f"data: {batch.why}")
            yield batch

    def _batch(self, items: list[Any]) -> Any:
        return next((item for item in items if isinstance(item, Unreadable)), None) or self.collate(items)

    def close(self) -> None:
        pass


def stacked(items: list[Any]) -> tuple[Tensor, Tensor]:
    """Stacks images or clips of one size, and their labels."""
    images = torch.stack([image for image, _ in items])
    layout = torch.channels_last if images.dim() == 4 else torch.channels_last_3d
    return images.contiguous(memory_format=layout), torch.tensor([label for _, label in items])


def _leave_signals_to_the_parent(_: int) -> None:
    """Ignores Ctrl-C, which is sent to all processes: the parent saves, and then ends its workers with SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
