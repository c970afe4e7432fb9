# SPDX-License-Identifier: Apache-2.0
"""Annotated images of any layout. Every box is checked here.

A box is (x1, y1, x2, y2) in pixels of its image. An invalid box raises an error that names the file and the object. A box
without area is dropped with a warning.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from byteback.suggestions import unknown

Box = tuple[float, float, float, float]
_NAMED = 5  # how many boxes a warning lists
_ROUNDING = 0.5  # pixels by which x + width may exceed the image
_LEAST_SIDE = 0.01  # pixels; a thinner box may lose its area when it is moved and resized in float32


@dataclass
class Picture:
    """An image and the objects in it. Label 0 is the background, so labels start at 1."""

    path: Path
    width: int
    height: int
    boxes: list[Box] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    crowd: list[bool] = field(default_factory=list)  # of COCO: one box around many objects; not used for training


@dataclass(frozen=True)
class Split:
    """The images of one split, and the names of labels 1, 2, ..."""

    pictures: list[Picture]
    classes: list[str]


class Checks:
    """Checks objects and adds them to pictures; `finish` warns about those that were dropped."""

    def __init__(self, data: str, classes: list[str]) -> None:
        if len(set(classes)) != len(classes):
            twice = next(name for name in classes if classes.count(name) > 1)
            raise ValueError(f"{data}: there are two classes {twice!r}. Rename one.")
        self.data, self.classes = data, classes
        self.numbers = {name: number for number, name in enumerate(classes, 1)}
        self.without_area: list[str] = []

    def add(self, picture: Picture, where: str, name: str, box: Box, crowd: bool = False) -> None:
        """Adds an object. `where` is its file and which object it is, for error messages."""
        if name not in self.numbers:
            raise unknown(where, "class", name, self.classes)
        x1, y1, x2, y2 = box
        shown = "(" + ", ".join(f"{value:g}" for value in box) + ")"
        if not all(math.isfinite(value) for value in box) or x2 < x1 or y2 < y1:
            raise ValueError(f"{where}: invalid box {shown}: it must have x1 <= x2 and y1 <= y2. Correct the annotation.")
        inside = (max(x1, 0.0), max(y1, 0.0), min(x2, float(picture.width)), min(y2, float(picture.height)))
        if max(abs(one - other) for one, other in zip(box, inside, strict=True)) > _ROUNDING:
            raise ValueError(
                f"{where}: the box {shown} exceeds its image, which has {picture.width}x{picture.height} pixels. "
                "Correct the annotation."
            )
        x1, y1, x2, y2 = inside
        if x2 - x1 < _LEAST_SIDE or y2 - y1 < _LEAST_SIDE:
            self.without_area.append(f"{where} {shown}")
            return
        picture.boxes.append(inside)
        picture.labels.append(self.numbers[name])
        picture.crowd.append(crowd)

    def finish(self) -> None:
        """Warns about the boxes that were dropped."""
        if self.without_area:
            shown = "; ".join(self.without_area[:_NAMED]) + ("; ..." if len(self.without_area) > _NAMED else "")
            warnings.warn(f"{self.data}: dropped {len(self.without_area)} boxes without area: {shown}", stacklevel=2)


def existing(path: Path, where: str) -> Path:
    """Returns the path of an image. Raises an error if the file does not exist."""
    if not path.is_file():
        raise ValueError(f"{where}: the image {path} is missing. Add it, or remove the entry.")
    return path
