# SPDX-License-Identifier: Apache-2.0
"""Batches of images with their boxes, read by worker processes and augmented with torchvision's v2 transforms.

A batch is (list of images (3, H, W) float32 in [0, 1], list of targets); sizes differ, and the detector's own transform brings
them to one. As everywhere, what happens to an image is drawn from (seed, epoch, index) alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from byteback.torchvision_compat import load as load_torchvision
from byteback.train.data import Data, draws
from byteback.train.data.folder import Unreadable, _leave_signals_to_the_parent
from byteback.train.detect import coco, voc
from byteback.train.detect.annotations import Picture, Split
from byteback.train.near import unknown

LAYOUTS = {"voc": voc.load, "coco": coco.load}
_ZOOM = (1.0, 1.5)  # how much larger than the image the canvas is that half of them are put on
_GREY = 0.45  # what the rest of that canvas is filled with: about the mean of photographs


@dataclass(frozen=True)
class DetectData(Data):
    """A data set with boxes; `classes` counts the background, `names` does not."""

    names: tuple[str, ...] = ()
    test_split: Split | None = None


def load(name: str, image_size: int, augment: bool, workers: int) -> DetectData:
    """The data set `name`, which is voc:PATH or coco:PATH."""
    kind, colon, path = name.partition(":")
    if kind not in LAYOUTS or not path:
        raise unknown("train", "data set for detection", name, [f"{layout}:PATH" for layout in LAYOUTS])
    train, test = LAYOUTS[kind](Path(path))
    if not any(picture.boxes for picture in train.pictures):
        raise ValueError(f"{name}: no image of the training split has an object, so there is nothing to learn.")
    return DetectData(
        *(name, len(train.classes) + 1, image_size, 3),
        Boxes(train.pictures, augment, workers),
        Boxes(test.pictures, False, workers),
        names=tuple(train.classes),
        test_split=test,
    )


class Boxes:
    """The images of a split with their boxes."""

    def __init__(self, pictures: list[Picture], augment: bool, workers: int) -> None:
        self.dataset = _Pictures(pictures, augment)
        self.workers = workers

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, chosen: Sequence[Tensor], seed: int, epoch: int) -> Iterator[Any]:
        keys = [[(seed, epoch, index) for index in batch.tolist()] for batch in chosen]
        loader: DataLoader[Any] = DataLoader(
            *(self.dataset,),
            batch_sampler=keys,
            num_workers=min(self.workers, len(keys)),
            collate_fn=list,
            worker_init_fn=_leave_signals_to_the_parent,
            generator=torch.Generator(),  # else it would draw from the one that the samplers of a detector use
        )
        for items in loader:
            broken = next((item for item in items if isinstance(item, Unreadable)), None)
            if broken is not None:
                raise ValueError(f"data: {broken.why}")
            yield [image for image, _ in items], [target for _, target in items]

    def close(self) -> None:
        pass


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
        from PIL import Image
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional

        seed, epoch, index = key
        picture = self.pictures[index]
        try:
            with Image.open(picture.path) as file:
                image = functional.pil_to_tensor(file.convert("RGB"))
        except (OSError, SyntaxError, ValueError) as error:  # Pillow says of a broken PNG that its syntax is wrong
            return Unreadable(f"{picture.path} cannot be read as an image: {error}. Repair or remove it.")
        size = tuple(image.shape[1:])
        if size != (picture.height, picture.width):
            return Unreadable(
                f"{picture.path} has {size[1]}x{size[0]} pixels, but its annotation says {picture.width}x{picture.height}; its "
                "boxes would lie elsewhere. Repair the annotation."
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
