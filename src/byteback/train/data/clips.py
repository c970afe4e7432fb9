# SPDX-License-Identifier: Apache-2.0
"""The data sets frames:PATH and clips:PATH: clips, read by worker processes, with the same augmentation for all frames.

The choice of frames, the crop and the flip are functions of (seed, epoch, index), as for images. `clip_files.py` finds and
reads the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from byteback.torchvision_compat import load
from byteback.train.data import clip_files, draws, scan
from byteback.train.data.clip_files import VIDEOS, Clip
from byteback.train.data.from_disk import FromDisk, Unreadable, stacked
from byteback.train.data.preprocess import CLIP_MEAN, CLIP_STD, Preprocess
from byteback.train.data.source import Data


class _Clips(Dataset[Any]):
    """The clips of one split by (seed, epoch, index)."""

    def __init__(self, clips: Sequence[Clip], frames: int, stride: int, transform: Any, anywhere: bool) -> None:
        self.clips, self.frames, self.stride, self.transform, self.anywhere = clips, frames, stride, transform, anywhere

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, key: tuple[int, int, int]) -> tuple[Tensor, int] | Unreadable:
        seed, epoch, index = key
        clip, random = self.clips[index], draws.bits(seed, epoch, index, 2)[0]
        try:
            pixels = clip_files.read(clip.path, self.frames, self.stride, random[1] if self.anywhere else None)
        except ValueError as error:
            return Unreadable(str(error))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(random[0] >> 1))
            frames = self.transform(torch.from_numpy(pixels).permute(0, 3, 1, 2))  # the same for all frames
        return frames.transpose(0, 1), clip.label


def _readable(name: str, found: clip_files.Listing, workers: int, skip: bool) -> tuple[list[Clip], list[Clip]]:
    """Returns the clips of both splits whose images can all be read. Videos are only read in training."""
    frames = {clip: clip_files.images_of(clip.path) for clip in (*found.train, *found.test)}
    every = [file for files in frames.values() for file in files]
    good = dict(zip(every, scan.usable(name, every, workers, skip), strict=True))
    train, test = ([clip for clip in split if all(good[file] for file in frames[clip])] for split in (found.train, found.test))
    if not train or not test:
        raise ValueError(f"{name}: no clip of the {'test' if train else 'training'} split can be read.")
    return train, test


def clips(
    kind: str, path: Path, frames: int, stride: int, image_size: int, augment: bool, workers: int, skip: bool = False
) -> Data:
    """Loads the data set in `path`."""
    load()
    from torchvision.transforms import v2

    found = clip_files.find(kind, path)
    if any(clip.path.suffix.lower() in VIDEOS for clip in (*found.train, *found.test) if kind == "clips"):
        clip_files.av()  # if it is missing, fail now and not in a worker
    train_clips, test_clips = _readable(f"{kind}:{path}", found, workers, skip)
    end = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(CLIP_MEAN), list(CLIP_STD))]
    preprocess = Preprocess("clip", image_size, 3, CLIP_MEAN, CLIP_STD, frames=frames, stride=stride)
    plain = preprocess.transform()
    scale = v2.RandomResizedCrop(image_size, scale=(0.4, 1.0), antialias=True)
    random = [scale, v2.RandomHorizontalFlip(), *end]
    train = _Clips(train_clips, frames, stride, v2.Compose(random) if augment else plain, anywhere=augment)
    test = _Clips(test_clips, frames, stride, plain, anywhere=False)
    splits = FromDisk(train, workers, stacked), FromDisk(test, workers, stacked)
    return Data(f"{kind}:{path}", len(found.classes), image_size, 3, *splits, frames, tuple(found.classes), preprocess)
