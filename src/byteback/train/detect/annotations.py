# SPDX-License-Identifier: Apache-2.0
"""Annotated images, whatever the layout they were read from; every box is checked here, once.

A box is (x1, y1, x2, y2) in pixels of its image. What cannot be right is an error that names file and object; a box without
area is no object, so it is left out with a warning.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from byteback.suggestions import unknown

Box = tuple[float, float, float, float]
_NAMED = 5  # boxes that a warning names one by one
_ROUNDING = 0.5  # pixels outside of the image that x + width may come to
_LEAST_SIDE = 0.01  # pixels; a thinner box would have no area once it is float32, moved and made smaller


@dataclass
class Picture:
    """An image and the objects in it; label 0 is the background, which no object has."""

    path: Path
    width: int
    height: int
    boxes: list[Box] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    crowd: list[bool] = field(default_factory=list)  # of COCO: one box around many objects; not trained on


@dataclass(frozen=True)
class Split:
    """The images of one split, and the names of labels 1, 2, ..."""

    pictures: list[Picture]
    classes: list[str]


class Checks:
    """Adds objects to pictures, if they can be right; `finish` warns of those that were left out."""

    def __init__(self, data: str, classes: list[str]) -> None:
        if len(set(classes)) != len(classes):
            twice = next(name for name in classes if classes.count(name) > 1)
            raise ValueError(f"{data}: the class {twice!r} is there twice, so its objects cannot be told apart. Rename one.")
        self.data, self.classes = data, classes
        self.numbers = {name: number for number, name in enumerate(classes, 1)}
        self.without_area: list[str] = []

    def add(self, picture: Picture, where: str, name: str, box: Box, crowd: bool = False) -> None:
        """An object; `where` names its file and which object of it this is."""
        if name not in self.numbers:
            raise unknown(where, "class", name, self.classes)
        x1, y1, x2, y2 = box
        shown = "(" + ", ".join(f"{value:g}" for value in box) + ")"
        if not all(math.isfinite(value) for value in box) or x2 < x1 or y2 < y1:
            raise ValueError(f"{where}: the box {shown} is none: it must have x1 <= x2 and y1 <= y2. Repair the annotation.")
        inside = (max(x1, 0.0), max(y1, 0.0), min(x2, float(picture.width)), min(y2, float(picture.height)))
        if max(abs(one - other) for one, other in zip(box, inside, strict=True)) > _ROUNDING:
            raise ValueError(
                f"{where}: the box {shown} reaches outside of its image, which has {picture.width}x{picture.height} pixels. "
                "Repair the annotation."
            )
        x1, y1, x2, y2 = inside
        if x2 - x1 < _LEAST_SIDE or y2 - y1 < _LEAST_SIDE:
            self.without_area.append(f"{where} {shown}")
            return
        picture.boxes.append(inside)
        picture.labels.append(self.numbers[name])
        picture.crowd.append(crowd)

    def finish(self) -> None:
        """Says what was left out."""
        if self.without_area:
            shown = "; ".join(self.without_area[:_NAMED]) + ("; ..." if len(self.without_area) > _NAMED else "")
            warnings.warn(f"{self.data}: left out {len(self.without_area)} boxes without area: {shown}", stacklevel=2)


def existing(path: Path, where: str) -> Path:
    """The path of an image, if there is one."""
    if not path.is_file():
        raise ValueError(f"{where}: its image {path} is missing. Put it there, or take the entry out.")
    return path
