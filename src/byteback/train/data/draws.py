# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are a function of (seed, epoch, image) only.

With a sequential generator the images would depend on the number of workers, and training could not resume in the middle of an
epoch. So each number is a hash of its key: the finalizer of splitmix64, applied once per part.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64: every bit of x influences every bit of the result; uint64 wraps around."""
    with np.errstate(over="ignore"):
        z = x + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)))


def bits(seed: int, epoch: int, index: np.ndarray | int, count: int = 1) -> np.ndarray:
    """Returns `count` random 64-bit numbers for every image of `index`: (images, count) uint64."""
    key = _mixed(_mixed(np.asarray([seed], dtype=np.uint64)) + np.uint64(epoch))
    with np.errstate(over="ignore"):
        image = _mixed(key + np.asarray(index, dtype=np.uint64).reshape(-1))
        return _mixed(image[:, None] + _GOLDEN * np.arange(count, dtype=np.uint64))


def below(random: np.ndarray, limit: int) -> np.ndarray:
    """Converts random numbers to integers from 0 to limit - 1, as int64.

    >>> below(np.array([0, 2**64 - 1], dtype=np.uint64), 9)
    array([0, 8])
    """
    return ((random >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)


def order(seed: int, epoch: int, images: int) -> Tensor:
    """Returns the order of the images in an epoch."""
    generator = torch.Generator().manual_seed(int(bits(seed, epoch, 2**63)[0, 0] >> np.uint64(1)))
    return torch.randperm(images, generator=generator)


def batches(seed: int, epoch: int, images: int, size: int, ranks: int = 1) -> list[Tensor]:
    """Returns that order in batches. A last batch of a single image per rank is dropped: BatchNorm cannot train on it."""
    return [chosen for chosen in order(seed, epoch, images).split(size) if len(chosen) > 2 * ranks - 1]


def share(batch: Tensor, rank: int, ranks: int) -> Tensor:
    """Returns the part of a batch that a rank trains on. The parts differ by one image at most, and none is padded.

    >>> [share(torch.arange(5), rank, 2).tolist() for rank in range(2)]
    [[0, 1, 2], [3, 4]]
    """
    return batch.tensor_split(ranks)[rank]


def steps(images: int, size: int, ranks: int = 1) -> int:
    """Returns the number of batches in an epoch.

    >>> steps(129, 64), steps(130, 64)
    (2, 3)
    """
    full, rest = divmod(images, size)
    return full + (rest > 2 * ranks - 1)
