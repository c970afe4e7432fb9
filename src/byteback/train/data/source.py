# SPDX-License-Identifier: Apache-2.0
"""The interface of a data set, and data sets in memory.

Small images are augmented a batch at a time by one gather: crop and flip select rows and columns. This takes about a
millisecond per batch, so training does not wait for data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from byteback.train.data import draws
from byteback.train.data.preprocess import Preprocess

Batch = tuple[Tensor, Tensor]  # images (N, C, H, W) or clips (N, C, T, H, W) float32, channels_last is best; labels (N) int64


class DataError(ValueError):
    """Data could not be read during training. What was trained until then is saved."""


class Source(Protocol):
    """The images of one split."""

    def __len__(self) -> int: ...

    def batches(self, chosen: Sequence[Tensor], seed: int, epoch: int) -> Iterator[Batch]:
        """Yields one batch for every tensor of indices; a training split is augmented by (seed, epoch, index)."""
        ...

    def close(self) -> None:
        """Ends the worker processes, if there are any."""
        ...


@dataclass(frozen=True)
class Data:
    """A data set: its two splits, and what a network needs to know about it."""

    name: str
    classes: int
    image_size: int
    channels: int
    train: Source
    test: Source
    frames: int = 0
    """Frames per clip; 0 for images."""
    names: tuple[str, ...] = ()
    """Names of the classes, if the files have them, without the background of detection."""
    preprocess: Preprocess | None = None
    """How a file becomes an input."""
    note: str = ""
    """What a user should know about the splits."""

    def close(self) -> None:
        """Ends the worker processes of both splits."""
        self.train.close()
        self.test.close()


class Part:
    """Some images of a split, evenly spaced, because the images of a folder are sorted by class."""

    def __init__(self, whole: Source, images: int) -> None:
        self.whole = whole
        self.index = torch.arange(images) * len(whole) // images

    def __len__(self) -> int:
        return len(self.index)

    def batches(self, chosen: Sequence[Tensor], seed: int, epoch: int) -> Iterator[Batch]:
        return self.whole.batches([self.index[numbers] for numbers in chosen], seed, epoch)

    def close(self) -> None:
        self.whole.close()


class Held:
    """A split that is held in memory. A subclass implements `take`."""

    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, chosen: Sequence[Tensor], seed: int, epoch: int) -> Iterator[Batch]:
        for index in chosen:
            yield self.take(index, seed, epoch), self.labels[index]

    def take(self, index: Tensor, seed: int, epoch: int) -> Tensor:
        """Returns the samples of `index`, augmented and normalized."""
        raise NotImplementedError

    def close(self) -> None:
        pass


class InMemory(Held):
    """Images (N, H, W, C) uint8 with their labels, normalized per channel when they are read.

    crop   zero padding in pixels, before a random crop of the original size; 0 for no crop
    flip   whether to flip half of the images
    """

    def __init__(
        self, images: Tensor, labels: Tensor, mean: Sequence[float], std: Sequence[float], crop: int = 0, flip: bool = False
    ) -> None:
        self.images, self.labels, self.crop, self.flip = images, labels, crop, flip
        self.size = tuple(images.shape[1:3])
        if crop:
            self.images = torch.nn.functional.pad(images, (0, 0, crop, crop, crop, crop))
        self.scale = 1.0 / torch.tensor(std, dtype=torch.float32)
        self.shift = -torch.tensor(mean, dtype=torch.float32) * self.scale

    def take(self, index: Tensor, seed: int, epoch: int) -> Tensor:
        """Returns the images of `index`, augmented and normalized."""
        pixels = self._augmented(index, seed, epoch) if self.crop or self.flip else self.images[index]
        return pixels.float().mul_(self.scale).add_(self.shift).permute(0, 3, 1, 2)

    def _augmented(self, index: Tensor, seed: int, epoch: int) -> Tensor:
        """Applies RandomCrop(size, padding=crop) and RandomHorizontalFlip by selecting rows and columns."""
        random = draws.bits(seed, epoch, index.numpy(), 3)
        limit = 2 * self.crop + 1
        rows = draws.below(random[:, 0], limit)[:, None] + np.arange(self.size[0])
        columns = np.broadcast_to(np.arange(self.size[1]), (len(index), self.size[1]))
        if self.flip:
            columns = np.where(draws.below(random[:, 2], 2)[:, None] == 1, columns[:, ::-1], columns)
        columns = draws.below(random[:, 1], limit)[:, None] + columns
        return self.images[index[:, None, None], torch.from_numpy(rows)[:, :, None], torch.from_numpy(columns)[:, None, :]]
