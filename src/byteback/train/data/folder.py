# SPDX-License-Identifier: Apache-2.0
"""folder:PATH, images on disk in ImageNet's layout, read by worker processes with torchvision's v2 transforms.

    PATH/train/CLASS/IMAGE        PATH/val/CLASS/IMAGE (or test instead of val)

Every image is augmented with a random state of its own, made of (seed, epoch, index); so what a batch holds does not depend
on the number of workers, nor on where an epoch begins.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from byteback.torchvision_compat import load
from byteback.train.data import draws
from byteback.train.data.source import Batch, Data

_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # ImageNet's


@dataclass(frozen=True)
class Unreadable:
    """What a worker hands over instead of an image; an exception would arrive as a page of traceback."""

    why: str


class _Images(Dataset[Any]):
    """The images of one split by (seed, epoch, index)."""

    def __init__(self, images: Any, transform: Any) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int, int]) -> tuple[Tensor, int] | Unreadable:
        seed, epoch, index = key
        path = self.images.samples[index][0]
        try:
            image, label = self.images[index]
        except (OSError, SyntaxError, ValueError) as error:  # Pillow says of a broken PNG that its syntax is wrong
            return Unreadable(f"{path} cannot be read as an image: {error}. Repair or remove it.")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(draws.bits(seed, epoch, index)[0, 0] >> 1))
            return self.transform(image), label


class FromFolder:
    """A split on disk."""

    def __init__(self, images: Any, transform: Any, workers: int) -> None:
        self.dataset = _Images(images, transform)
        self.workers = workers

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, chosen: Sequence[Tensor], seed: int, epoch: int) -> Iterator[Batch]:
        keys = [[(seed, epoch, index) for index in batch.tolist()] for batch in chosen]
        loader: DataLoader[Any] = DataLoader(
            *(self.dataset,),
            batch_sampler=keys,
            num_workers=self.workers,
            collate_fn=_collated,
            worker_init_fn=_leave_signals_to_the_parent,
            generator=torch.Generator(),  # else it would draw from the one that dropout uses
        )
        for batch in loader:
            if isinstance(batch, Unreadable):
                raise ValueError(f"data: {batch.why}")
            yield batch

    def close(self) -> None:
        pass


def _collated(items: list[Any]) -> Batch | Unreadable:
    broken = next((item for item in items if isinstance(item, Unreadable)), None)
    if broken is not None:
        return broken
    images = torch.stack([image for image, _ in items])
    layout = torch.channels_last if images.dim() == 4 else torch.channels_last_3d
    return images.contiguous(memory_format=layout), torch.tensor([label for _, label in items])


def _leave_signals_to_the_parent(_: int) -> None:
    """Ctrl-C reaches the whole group of processes; the parent saves, and then ends its workers by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)


def folder(path: Path, image_size: int, augment: bool, workers: int) -> Data:
    """The data set in `path`."""
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
    if train.classes != tested.classes:
        differ = sorted(set(train.classes) ^ set(tested.classes))
        raise ValueError(
            f"folder:{path}: the classes of {path / 'train'} and {test} differ in {', '.join(differ[:5])}; a label would "
            "mean two things. Give both the same folders."
        )
    return Data(
        *(f"folder:{path}", len(train.classes), image_size, 3),
        FromFolder(train, v2.Compose(random if augment else plain), workers),
        FromFolder(tested, v2.Compose(plain), workers),
    )
