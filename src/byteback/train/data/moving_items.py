# SPDX-License-Identifier: Apache-2.0
"""moving-items: clips of Fashion-MNIST items that move in one of four directions. The label is the direction.

An item of half its size moves by 1 to 3 pixels per frame over a square canvas and wraps around at its borders. It starts at a
random place, so a single frame says nothing about the label, and a clip that moves left is a clip that moves right in reverse
order: only a network that uses the order of the frames can learn it. Noise is added to every pixel, or the task would be too
easy. Clips are not stored, but computed from their index.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from byteback.train.data import draws
from byteback.train.data.downloaded import downloaded
from byteback.train.data.source import Data, Held, InMemory

DIRECTIONS = ((0, 1), (0, -1), (1, 0), (-1, 0))  # rows, columns: right, left, down, up
TRAIN, TEST = 4000, 1000  # clips
ITEM, MIN_CANVAS = 14, 16
NOISE = 3  # parts of noise, uniform from 0 to 255, per part of the item
_SEED = 20260  # of label, speed and start; the seed of a run shifts the start


class MovingItems(Held):
    """Clips made of items (N, 14, 14) uint8. With `augment` a clip has a new start and new noise in every epoch."""

    def __init__(self, items: Tensor, split: int, frames: int, size: int, mean: float, std: float, augment: bool) -> None:
        self.canvas = torch.nn.functional.pad(items, (0, size - ITEM, 0, size - ITEM))
        self.frames, self.size, self.split, self.augment, self.mean, self.std = frames, size, split, augment, mean, std
        random = draws.bits(_SEED, split, np.arange(len(items)), 4)
        self.labels = torch.from_numpy(draws.below(random[:, 0], len(DIRECTIONS)))
        self.speed = torch.from_numpy(1 + draws.below(random[:, 1], 3))
        self.start = torch.from_numpy(np.stack([draws.below(random[:, 2], size), draws.below(random[:, 3], size)], axis=1))

    def take(self, index: Tensor, seed: int, epoch: int) -> Tensor:
        """Returns clips (N, 1, frames, size, size), normalized."""
        start = self.start[index]
        if self.augment:
            start = start + torch.from_numpy(draws.below(draws.bits(seed, epoch, index.numpy(), 2), self.size))
        step = torch.tensor(DIRECTIONS)[self.labels[index]] * self.speed[index, None]
        place = start[:, None, :] + step[:, None, :] * torch.arange(self.frames)[None, :, None]  # (N, frames, 2)
        pixel = torch.arange(self.size)
        rows = (pixel - place[:, :, :1]) % self.size
        columns = (pixel - place[:, :, 1:]) % self.size
        clips = self.canvas[index[:, None, None, None], rows[:, :, :, None], columns[:, :, None, :]].float()
        clips = clips.add_(self._noise(index, seed, epoch), alpha=NOISE).div_(NOISE + 1)
        return clips.sub_(self.mean).div_(self.std).unsqueeze(1)

    def _noise(self, index: Tensor, seed: int, epoch: int) -> Tensor:
        """Returns (N, frames, size, size) uint8: eight pixels from every random number."""
        pixels = self.frames * self.size * self.size
        key = (seed, epoch) if self.augment else (_SEED, self.split)
        random = draws.bits(*key, index.numpy(), 4 + -(-pixels // 8))[:, 4:]  # the first four are used for the clip
        noise = np.ascontiguousarray(random).view(np.uint8)[:, :pixels]
        return torch.from_numpy(noise).reshape(len(index), self.frames, self.size, self.size)


def moving_items(root: Path, frames: int, size: int, augment: bool, download: bool) -> Data:
    """Builds the data set from Fashion-MNIST in `root`."""
    if size < MIN_CANVAS:
        raise ValueError(
            f"moving-items: --image-size is {size}; an item has {ITEM}x{ITEM} pixels and needs room to move. "
            f"Choose {MIN_CANVAS} or more."
        )
    source = downloaded("fashion-mnist", root, augment=False, download=download)
    parts = []
    for part, count in ((source.train, TRAIN), (source.test, TEST)):
        assert isinstance(part, InMemory)
        whole = part.images[:count, 2:30, 2:30, 0].float()  # without the padding to 32x32
        parts.append(torch.nn.functional.avg_pool2d(whole[:, None], 2)[:, 0].round().to(torch.uint8))
    values = torch.nn.functional.pad(parts[0], (0, size - ITEM, 0, size - ITEM)).double()
    mean = (float(values.mean()) + NOISE * 127.5) / (NOISE + 1)
    std = math.sqrt(float(values.var()) + NOISE**2 * (256**2 - 1) / 12) / (NOISE + 1)
    train, test = (MovingItems(items, i, frames, size, mean, std, augment and i == 0) for i, items in enumerate(parts))
    return Data("moving-items", len(DIRECTIONS), size, 1, train, test, frames)
