# SPDX-License-Identifier: Apache-2.0
"""Batches of images with boxes, read by worker processes and augmented with torchvision's v2 transforms.

A batch is (list of images (3, H, W) float32 in [0, 1], list of targets). The images have different sizes; the transform of the
detector resizes them. As for other data sets, the augmentation is a function of (seed, epoch, index).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from byteback.suggestions import unknown
from byteback.torchvision_compat import load as load_torchvision
from byteback.train.data import Data, draws, pictures, scan
from byteback.train.data.from_disk import FromDisk, Unreadable
from byteback.train.data.preprocess import Preprocess
from byteback.train.detect import coco, voc
from byteback.train.detect.annotations import Picture, Split

LAYOUTS = {"voc": voc.load, "coco": coco.load}
_ZOOM = (1.0, 1.5)  # side of the canvas of a zoomed-out image, relative to the image
_GREY = 0.45  # fill value of that canvas: about the mean of photographs


@dataclass(frozen=True)
class DetectData(Data):
    """A data set with boxes; `classes` counts the background, `names` does not."""

    test_split: Split | None = None


def load(name: str, image_size: int, augment: bool, workers: int, skip: bool = False) -> DetectData:
    """Loads the data set `name`, which is voc:PATH or coco:PATH."""
    kind, colon, path = name.partition(":")
    if kind not in LAYOUTS or not path:
        raise unknown("train", "data set for detection", name, [f"{layout}:PATH" for layout in LAYOUTS])
    train, test = LAYOUTS[kind](Path(path))
    for split, kind, verb in ((train, "training", "learn"), (test, "test", "find")):
        if all(all(picture.crowd) for picture in split.pictures):
            raise ValueError(
                f"{name}: no image of the {kind} split has an object, so there is nothing to {verb}. Add annotations."
            )
    every = [*train.pictures, *test.pictures]
    good = dict(zip(map(id, every), scan.usable(name, [picture.path for picture in every], workers, skip), strict=True))
    train, test = (replace(split, pictures=[p for p in split.pictures if good[id(p)]]) for split in (train, test))
    if not train.pictures or not test.pictures:
        raise ValueError(f"{name}: no image of the {'test' if train.pictures else 'training'} split can be read.")
    return DetectData(
        *(name, len(train.classes) + 1, image_size, 3),
        FromDisk(_Pictures(train.pictures, augment), workers, _lists),
        FromDisk(_Pictures(test.pictures, False), workers, _lists),
        names=tuple(train.classes),
        preprocess=Preprocess("detect", image_size, 3),
        test_split=test,
    )


def _lists(items: list[Any]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    return [image for image, _ in items], [target for _, target in items]


class _Pictures(Dataset[Any]):
    """Images by (seed, epoch, index)."""

    def __init__(self, pictures: list[Picture], augment: bool) -> None:
        load_torchvision()
        from torchvision.transforms import v2

        self.pictures = pictures
        random = [v2.RandomZoomOut(fill=_GREY, side_range=_ZOOM), v2.RandomHorizontalFlip()] if augment else []
        end = [v2.ToDtype(torch.float32, scale=True), *random]
        self.transform = v2.Compose(end)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, key: tuple[int, int, int]) -> tuple[Tensor, dict[str, Tensor]] | Unreadable:
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional

        seed, epoch, index = key
        picture = self.pictures[index]
        try:
            image = functional.pil_to_tensor(pictures.read(picture.path))
        except pictures.Unreadable as error:
            return Unreadable(str(error))
        size = tuple(image.shape[1:])
        if size != (picture.height, picture.width):
            return Unreadable(
                f"{picture.path} has {size[1]}x{size[0]} pixels, but its annotation says {picture.width}x{picture.height}, so "
                "its boxes would be wrong. Correct the annotation."
            )
        learnt = [number for number, crowd in enumerate(picture.crowd) if not crowd]
        boxes = torch.tensor([picture.boxes[number] for number in learnt], dtype=torch.float32).reshape(-1, 4)
        labels = torch.tensor([picture.labels[number] for number in learnt], dtype=torch.int64)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(draws.bits(seed, epoch, index)[0, 0] >> 1))
            image, boxes = self.transform(
                tv_tensors.Image(image), tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size)
            )
        return image.as_subclass(Tensor), {"boxes": boxes.as_subclass(Tensor), "labels": labels, "index": torch.tensor(index)}
