# SPDX-License-Identifier: Apache-2.0
"""The detection metrics of COCO, computed by pycocotools. mAP is the mean over classes and over overlaps of 50 to 95 %."""

from __future__ import annotations

import contextlib
import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from byteback.train.detect.annotations import Picture, Split


@dataclass(frozen=True)
class Curves:
    """Precision at recalls of 0, 0.01, ..., 1, class by class: [classes][101]; -1 for a class without objects."""

    at_50: Any  # for overlaps (intersection over union) of 50 %
    mean: Any  # the mean over overlaps of 50 to 95 %


@dataclass(frozen=True)
class Scores:
    """Average precision in [0, 1]; NaN for a class without objects."""

    mAP: float
    AP50: float
    AP75: float
    per_class: dict[str, float]
    curves: Curves | None = None

    def __str__(self) -> str:
        shown = {
            "mAP": self.mAP,
            "AP50": self.AP50,
            "AP75": self.AP75,
            **{f"AP of {name}": ap for name, ap in self.per_class.items()},
        }
        return ", ".join(f"{what} {'none' if math.isnan(value) else f'{value:.2%}'}" for what, value in shown.items())

    def record(self) -> dict[str, Any]:
        """Returns the scores as fields for metrics.jsonl."""
        return {"mAP": self.mAP, "AP50": self.AP50, "AP75": self.AP75, "per_class_AP": self.per_class}


def score(split: Split, detections: dict[int, dict[str, Tensor]]) -> Scores:
    """Computes the metrics of detections: index of the image → boxes, labels, scores."""
    COCO, COCOeval = pycocotools()
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        truth = COCO()
        truth.dataset = _truth(split)
        truth.createIndex()
        rows = [row for index, found in detections.items() for row in _rows(index, found)]
        run = COCOeval(truth, truth.loadRes(np.asarray(rows)) if rows else COCO(), "bbox")
        run.evaluate()
        run.accumulate()
    # precision: [overlaps, recalls, classes, sizes of objects, numbers of detections]; -1 for a class without objects
    precision = run.eval["precision"][:, :, :, 0, -1]
    overlaps = np.round(100 * run.params.iouThrs).astype(int).tolist()
    at_50 = precision[overlaps.index(50)]
    return Scores(
        _mean(precision),
        _mean(at_50),
        _mean(precision[overlaps.index(75)]),
        {name: _mean(precision[:, :, number]) for number, name in enumerate(split.classes)},
        Curves(at_50.T, precision.mean(axis=0).T),  # a class has objects for every overlap or for none
    )


def _mean(precision: Any) -> float:
    known = precision[precision > -1]
    return float(known.mean()) if known.size else float("nan")


def _truth(split: Split) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    for index, picture in enumerate(split.pictures):
        entries += _objects(index, picture, len(entries) + 1)
    return {
        "images": [{"id": index, "width": p.width, "height": p.height} for index, p in enumerate(split.pictures)],
        "categories": [{"id": number, "name": name} for number, name in enumerate(split.classes, 1)],
        "annotations": entries,
    }


def _objects(index: int, picture: Picture, first: int) -> list[dict[str, Any]]:
    found = []
    for number, ((x1, y1, x2, y2), label, crowd) in enumerate(
        zip(picture.boxes, picture.labels, picture.crowd, strict=True), first
    ):
        width, height = x2 - x1, y2 - y1
        found.append(
            {
                **{"id": number, "image_id": index, "category_id": label, "iscrowd": int(crowd)},
                **{"bbox": [x1, y1, width, height], "area": width * height},
            }
        )
    return found


def _rows(index: int, found: dict[str, Tensor]) -> list[list[float]]:
    """Returns (image, x, y, width, height, score, class) of each detection."""
    boxes = found["boxes"].double()
    corners = np.concatenate([boxes[:, :2].numpy(), (boxes[:, 2:] - boxes[:, :2]).numpy()], axis=1).tolist()
    pairs = zip(corners, found["scores"].tolist(), found["labels"].tolist(), strict=True)
    return [[index, *corner, score, label] for corner, score, label in pairs]


def pycocotools() -> Any:
    """Returns COCO and COCOeval. Raises an error that says how to install pycocotools if it is missing."""
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise ImportError(
            "train: detections are scored with pycocotools, which is not installed. Install it: pip install 'byteback[detect]'",
            name="pycocotools",
        ) from error
    return COCO, COCOeval
