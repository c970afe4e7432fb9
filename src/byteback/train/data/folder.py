# SPDX-License-Identifier: Apache-2.0
"""folder:PATH: images on disk in the layout of ImageNet, read by worker processes with torchvision's v2 transforms.

PATH/train/CLASS/IMAGE        PATH/val/CLASS/IMAGE (or test instead of val)
PATH/CLASS/IMAGE              a flat folder: a fifth of the images of every class, drawn with a fixed seed, are the test images
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from byteback.torchvision_compat import load
from byteback.train.data import draws, pictures, scan
from byteback.train.data.from_disk import FromDisk, Unreadable, stacked
from byteback.train.data.preprocess import PHOTO_MEAN, PHOTO_STD, Preprocess
from byteback.train.data.source import Data

_SPLITS = ("train", "val", "test")
SPLIT_SEED, SPLIT_EVERY = 0, 5
"""A flat folder is split with this seed: one image of five of each class is a test image."""


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
    load()
    from torchvision.transforms import v2

    preprocess = Preprocess("photo", image_size, 3, PHOTO_MEAN, PHOTO_STD)
    plain = preprocess.transform()
    end = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(PHOTO_MEAN), list(PHOTO_STD))]
    random = v2.Compose([v2.RandomResizedCrop(image_size, antialias=True), v2.RandomHorizontalFlip(), *end])
    splits, classes, note = _listed(path)
    every = [*splits[0], *splits[1]]
    good = scan.usable(f"folder:{path}", [Path(file) for file, _ in every], workers, skip)
    kept = [sample for sample, is_good in zip(every, good, strict=True) if is_good]
    count = sum(good[: len(splits[0])])
    if not 0 < count < len(kept):
        raise ValueError(f"folder:{path}: no image of the {'training' if count == 0 else 'test'} split can be read.")
    return Data(
        *(f"folder:{path}", len(classes), image_size, 3),
        FromDisk(_Images(kept[:count], random if augment else plain), workers, stacked),
        FromDisk(_Images(kept[count:], plain), workers, stacked),
        names=tuple(classes),
        preprocess=preprocess,
        note=note,
    )


def _listed(path: Path) -> tuple[tuple[list[Any], list[Any]], list[str], str]:
    """Returns (file, label) of the images of both splits, the classes, and what to say about the splits."""
    if not _is_flat(path):
        train, test = _two_splits(path)
        return (train.samples, test.samples), train.classes, ""
    whole = _split(path, path)
    held = _drawn(whole.targets)
    note = (
        f"The folder has no train and val, so {len(held):,} of its {len(whole):,} images, one of {SPLIT_EVERY} of every class, "
        f"are the test images; they are drawn with the seed {SPLIT_SEED}."
    )
    parts = ([sample for number, sample in enumerate(whole.samples) if (number in held) == tests] for tests in (False, True))
    return (next(parts), next(parts)), whole.classes, note


def _is_flat(path: Path) -> bool:
    """Whether a folder has folders of classes, and none of a split."""
    folders = [entry.name for entry in path.iterdir() if entry.is_dir()] if path.is_dir() else []
    return len(folders) > 1 and not any(name in _SPLITS for name in folders)


def _drawn(targets: list[int]) -> set[int]:
    """Returns the numbers of the test images of a flat folder."""
    labels, test = np.asarray(targets), set()
    for label in np.unique(labels):
        own = np.flatnonzero(labels == label)
        order = np.argsort(draws.bits(SPLIT_SEED, 0, own)[:, 0], kind="stable")
        test.update(own[order[: len(own) // SPLIT_EVERY]].tolist())
    return test


def _split(path: Path, where: Path) -> Any:
    try:
        return load().datasets.ImageFolder(where)
    except FileNotFoundError as error:
        raise ValueError(f"folder:{path}: {error}") from error


def _two_splits(path: Path) -> tuple[Any, Any]:
    """Returns the images of both folders."""
    test = next((path / name for name in ("val", "test") if (path / name).is_dir()), None)
    missing = path / "train" if not (path / "train").is_dir() else path / "val" if test is None else None
    if missing is not None or test is None:
        raise ValueError(
            f"folder:{path}: there is no folder {missing}. The layout is {path}/train/CLASS/IMAGE and {path}/val/CLASS/IMAGE, "
            f"or {path}/CLASS/IMAGE, one folder per class."
        )
    train, tested = _split(path, path / "train"), _split(path, test)
    if len(train.classes) < 2:
        raise ValueError(f"folder:{path}: {path / 'train'} has only one class; a classifier needs two or more.")
    if train.classes != tested.classes:
        differ = sorted(set(train.classes) ^ set(tested.classes))
        raise ValueError(
            f"folder:{path}: the classes of {path / 'train'} and {test} differ: {', '.join(differ[:5])}. Both need the same "
            "folders, or a label would have two meanings."
        )
    return train, tested
