# SPDX-License-Identifier: Apache-2.0
"""detections.json: what is in it, that it is true to the scores, and that writing it changes nothing else."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pycocotools")
pytest.importorskip("PIL")
from PIL import Image

from byteback.train.detect import metrics, showcase, voc
from byteback.train.detect.annotations import Split
from byteback.train.detect.showcase import NAME, Showcase
from drawn_shapes import draw


@pytest.fixture
def split(tmp_path: Path) -> Split:
    return voc.load(draw(tmp_path / "shapes", train=6, test=8, size=(1200, 600)))[1]


def perfect(split: Split, score: float = 0.9) -> dict[int, Any]:
    found = {}
    for index, picture in enumerate(split.pictures):
        labels = torch.tensor(picture.labels)
        boxes = torch.tensor(picture.boxes, dtype=torch.float32)
        found[index] = {"boxes": boxes, "labels": labels, "scores": torch.full((len(labels),), score)}
    return found


def written(split: Split, found: dict[int, Any], folder: Path) -> Any:
    Showcase(split).write(folder, 3, found, metrics.score(split, found))
    return json.loads((folder / NAME).read_bytes())


def test_images_boxes_and_curves_are_in_the_file(split: Split, tmp_path: Path) -> None:
    record = written(split, perfect(split), tmp_path)
    assert record["epochs"] == 3 and record["classes"] == split.classes and len(record["images"]) == showcase.IMAGES
    assert [image["name"] for image in record["images"]] == [split.pictures[i].path.name for i in (0, 1, 3, 4, 6, 7)]
    image, picture = record["images"][0], split.pictures[0]
    assert [one["box"] for one in image["truth"]] == [list(box) for box in picture.boxes] and len(image["found"]) == 2
    with Image.open(io.BytesIO(base64.b64decode(image["jpeg"]))) as small:
        assert small.format == "JPEG" and small.size == (420, 210) and (image["width"], image["height"]) == (1200, 600)
    assert record["precision"]["50"] == [[1.0] * 101] * 2 and record["precision"]["50-95"] == [[1.0] * 101] * 2
    assert (tmp_path / NAME).stat().st_size < 200_000 and not list(tmp_path.glob("*.writing"))


def test_images_of_one_name_are_told_apart_by_their_folders(split: Split, tmp_path: Path) -> None:
    for number, picture in enumerate(split.pictures):
        place = tmp_path / f"camera{number}" / "1.png"
        place.parent.mkdir()
        picture.path = picture.path.rename(place)
    names = [image["name"] for image in written(split, perfect(split), tmp_path)["images"]]
    assert names[0] == "camera0/1.png" and len(set(names)) == len(names)


def test_the_mean_of_a_curve_is_its_score(split: Split, tmp_path: Path) -> None:
    found = perfect(split)
    for index in (1, 4):
        found[index]["boxes"] += 3  # overlaps less than others
    scores = metrics.score(split, found)
    record = written(split, found, tmp_path)
    own = [torch.tensor(curve).mean().item() for curve in record["precision"]["50-95"]]
    assert own == pytest.approx([scores.per_class[name] for name in split.classes], abs=1e-4)
    assert torch.tensor(record["precision"]["50"]).mean().item() == pytest.approx(scores.AP50, abs=1e-4)
    assert scores.mAP < scores.AP50


def test_unsure_boxes_are_left_out_and_the_surest_come_first(split: Split, tmp_path: Path) -> None:
    found = perfect(split)
    found[0]["scores"] = torch.tensor([0.05, 0.3])
    found[1]["scores"] = torch.tensor([0.2, 0.4])
    found[3]["boxes"][0, 0] = float("nan")
    images = written(split, found, tmp_path)["images"]
    assert [[box["score"] for box in image["found"]] for image in images[:3]] == [[0.3], [0.4, 0.2], [0.9]]


def test_nothing_found_and_nothing_to_find(split: Split, tmp_path: Path) -> None:
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "scores": torch.zeros(0)}
    record = written(split, {index: nothing for index in range(8)}, tmp_path)
    assert record["precision"]["50"] == [[0.0] * 101] * 2 and all(image["found"] == [] for image in record["images"])
    more = Split(split.pictures, [*split.classes, "absent"])
    record = written(more, perfect(more), tmp_path)
    assert record["precision"]["50"][2] is None and record["precision"]["50-95"][2] is None


def test_writing_draws_nothing_and_gives_the_same_bytes_again(split: Split, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    written(split, perfect(split), tmp_path)
    first = (tmp_path / NAME).read_bytes()
    written(split, perfect(split), tmp_path)
    assert (tmp_path / NAME).read_bytes() == first and torch.equal(torch.get_rng_state(), before)
