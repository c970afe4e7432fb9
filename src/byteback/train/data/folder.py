# SPDX-License-Identifier: Apache-2.0
"""folder:PATH: images on disk in the layout of ImageNet, read by worker processes with torchvision's v2 transforms.

PATH/train/CLASS/IMAGE        PATH/val/CLASS/IMAGE (or test instead of val)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from byteback.torchvision_compat import load
from byteback.train.data import draws, pictures, scan
from byteback.train.data.from_disk import FromDisk, Unreadable, stacked
from byteback.train.data.source import Data

_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # ImageNet's


class _Images(Dataset[Any]):
    """The images of one split by (seed, epoch, index)."""

    def __init__(self, samples: list[tuple[str, int]], transform: Any) -> None:
        self.samples, self.transform = samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: tuple[int, int, int]) -> tuple[Tensor, int] | Unreadable:
        seed, epoch, index = key
        path, label = self.samples[index]
        try:
            image = pictures.read(path)
        except pictures.Unreadable as error:
            return Unreadable(str(error))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(draws.bits(seed, epoch, index)[0, 0] >> 1))
            return self.transform(image), label


def folder(path: Path, image_size: int, augment: bool, workers: int, skip: bool = False) -> Data:
    """Loads the data set in `path`."""
    torchvision = load()
    from torchvision.transforms import v2

    test = next((path / name for name in ("val", "test") if (path / name).is_dir()), None)
    missing = path / "train" if not (path / "train").is_dir() else path / "val" if test is None else None
    if missing is not None or test is None:
        raise ValueError(
            f"folder:{path}: there is no folder {missing}. The layout is {path}/train/CLASS/IMAGE and {path}/val/CLASS/IMAGE, "
            "one folder per class."
        )
    end = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(_MEAN, _STD)]
    plain = [v2.Resize(round(image_size * 256 / 224), antialias=True), v2.CenterCrop(image_size), *end]
    random = [v2.RandomResizedCrop(image_size, antialias=True), v2.RandomHorizontalFlip(), *end]
    splits = []
    for where in (path / "train", test):
        try:
            splits.append(torchvision.datasets.ImageFolder(where))
        except FileNotFoundError as error:
            raise ValueError(f"folder:{path}: {error}") from error
    train, tested = splits
    if len(train.classes) < 2:
        raise ValueError(f"folder:{path}: {path / 'train'} has only one class; a classifier needs two or more.")
    if train.classes != tested.classes:
        differ = sorted(set(train.classes) ^ set(tested.classes))
        raise ValueError(
            f"folder:{path}: the classes of {path / 'train'} and {test} differ: {', '.join(differ[:5])}. Both need the same "
            "folders, or a label would have two meanings."
        )
    every = [*train.samples, *tested.samples]
    good = scan.usable(f"folder:{path}", [Path(file) for file, _ in every], workers, skip)
    kept = [sample for sample, is_good in zip(every, good, strict=True) if is_good]
    count = sum(good[: len(train.samples)])
    if not 0 < count < len(kept):
        raise ValueError(f"folder:{path}: no image of {path / 'train' if count == 0 else test} can be read.")
    return Data(
        *(f"folder:{path}", len(train.classes), image_size, 3),
        FromDisk(_Images(kept[:count], v2.Compose(random if augment else plain)), workers, stacked),
        FromDisk(_Images(kept[count:], v2.Compose(plain)), workers, stacked),
        names=tuple(train.classes),
    )
