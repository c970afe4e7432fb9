# SPDX-License-Identifier: Apache-2.0
"""A split on disk, read by worker processes: images, clips, or images with boxes.

The random state for the augmentation of an item is made from (seed, epoch, index). So the contents of a batch do not depend on
the number of workers, nor on the step where an epoch is resumed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from byteback.train import interrupt
from byteback.train.data.source import DataError


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
        workers = min(self.workers, len(keys))
        loader: DataLoader[Any] = DataLoader(
            *(self.dataset,),
            batch_sampler=keys,
            num_workers=workers,
            collate_fn=self._batch,
            worker_init_fn=_begin,
            generator=torch.Generator(),  # else it would use the default generator, which dropout and samplers of detectors use
        )
        with interrupt.held_back() if workers else contextlib.nullcontext():
            batches = iter(loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                raise DataError(
                    f"data: a process that reads images has died: {str(error).splitlines()[0]} It was killed from outside, for "
                    "example for want of memory: use fewer --workers, then continue with --resume."
                ) from error
            if isinstance(batch, Unreadable):
                raise DataError(f"data: {batch.why} It could be read before training. Restore it, then continue with --resume.")
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


def _begin(_: int) -> None:
    """Prepares a worker process."""
    interrupt.leave_to_the_parent()
    torch.set_num_threads(1)
