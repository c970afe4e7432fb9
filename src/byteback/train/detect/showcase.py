# SPDX-License-Identifier: Apache-2.0
"""detections.json: the detections of a member on a few test images, and its precision by recall. `byteback report` shows both.

It is made from the results of the test, so it does not change training. It is written atomically after every test, so at the
end it belongs to the last epoch, as the table does. A resumed run writes the same file. It contains small copies of the
images, so that the page can be made without the data set.
"""

from __future__ import annotations

import base64
import io
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from byteback.train.checkpoints import files
from byteback.train.data import pictures
from byteback.train.detect.annotations import Picture, Split
from byteback.train.detect.metrics import Scores

NAME = "detections.json"
FORMAT = 1
IMAGES = 6
LEAST_SCORE = 0.1  # detectors return about a hundred boxes below this
_MOST = 100  # boxes of an image
_SIDE = 420  # pixels of the longer side: enough for a quarter of a page
_QUALITY = 82  # of JPEG


class Showcase:
    """The images of a test split that are shown. They are the same for every recipe and seed."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.chosen = chosen(split.pictures)
        self.images: list[dict[str, Any]] | None = None

    def write(self, folder: Path, epochs: int, found: dict[int, dict[str, Tensor]], scores: Scores) -> None:
        """Writes the file of a member after `epochs` epochs."""
        assert scores.curves is not None
        if self.images is None:
            names = _names([self.split.pictures[index].path for index in self.chosen])
            self.images = [_described(name, self.split.pictures[index]) for name, index in zip(names, self.chosen, strict=True)]
        record = {
            **{"format": FORMAT, "epochs": epochs, "classes": self.split.classes, "least_score": LEAST_SCORE},
            "images": [{**image, "found": _above(found[index])} for index, image in zip(self.chosen, self.images, strict=True)],
            "precision": {"50": _curves(scores.curves.at_50), "50-95": _curves(scores.curves.mean)},
        }
        files.replace_json(folder / NAME, record)


def chosen(pictures: list[Picture]) -> list[int]:
    """Returns the indices of the images to show, evenly spaced among those that have objects.

    >>> chosen([Picture(Path("x"), 8, 8, [(0, 0, 4, 4)] * (number % 2)) for number in range(40)])
    [1, 9, 17, 23, 31, 39]
    """
    having = [index for index, picture in enumerate(pictures) if picture.boxes] or list(range(len(pictures)))
    if len(having) <= IMAGES:
        return having
    return [having[round(i * (len(having) - 1) / (IMAGES - 1))] for i in range(IMAGES)]


def _names(paths: list[Path]) -> list[str]:
    """Returns the names of files, with as many folders as needed to make them unique.

    >>> _names([Path("a/x/1.jpg"), Path("a/y/1.jpg")]), _names([Path("a/1.jpg"), Path("a/2.jpg")])
    (['x/1.jpg', 'y/1.jpg'], ['1.jpg', '2.jpg'])
    """
    parts = 1
    while len({path.parts[-parts:] for path in paths}) < len(set(paths)):
        parts += 1
    return ["/".join(path.parts[-parts:]) for path in paths]


def _described(name: str, picture: Picture) -> dict[str, Any]:
    small = pictures.read(picture.path)
    small.thumbnail((_SIDE, _SIDE))
    written = io.BytesIO()
    small.save(written, "JPEG", quality=_QUALITY)
    truth = zip(picture.labels, picture.boxes, picture.crowd, strict=True)
    return {
        **{"name": name.encode("utf-8", "replace").decode(), "width": picture.width, "height": picture.height},
        "jpeg": base64.b64encode(written.getvalue()).decode(),
        "truth": [{"label": label, "box": _pixels(box), "crowd": crowd} for label, box, crowd in truth],
    }


def _above(found: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Returns the boxes above the lowest score, sorted by score."""
    rows = zip(found["scores"].tolist(), found["labels"].tolist(), found["boxes"].tolist(), strict=True)
    sure = sorted((row for row in rows if row[0] >= LEAST_SCORE and all(map(math.isfinite, row[2]))), key=lambda row: -row[0])
    return [{"label": label, "score": round(score, 4), "box": _pixels(box)} for score, label, box in sure[:_MOST]]


def _pixels(box: Any) -> list[float]:
    return [round(value, 1) for value in box]


def _curves(precision: Any) -> list[list[float] | None]:
    """Returns the curves by class; None for a class without objects."""
    return [[round(value, 4) for value in own] if min(own) >= 0 else None for own in precision.tolist()]
