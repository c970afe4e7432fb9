# SPDX-License-Identifier: Apache-2.0
"""Boxes are read as they are written, what cannot be right is named, and what an image looks like depends on its key only."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("pycocotools")
pytest.importorskip("PIL")
from byteback import torchvision_compat
from byteback.train.detect import coco, metrics, source, voc
from byteback.train.detect.annotations import Picture, Split
from drawn_shapes import CLASSES, annotation, draw

torchvision_compat.load()


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    return draw(tmp_path / "shapes")


def rewrite(root: Path, *objects: tuple[str, float, float, float, float]) -> None:
    (root / "Annotations" / "image1.xml").write_text(annotation("image1.png", (96, 80), list(objects)))


def as_coco(root: Path, to: Path) -> Path:
    """The same data set in COCO's layout; category ids with gaps, as COCO's are."""
    train, test = voc.load(root)
    (to / "annotations").mkdir(parents=True)
    for name, split in (("train2017", train), ("val2017", test)):
        images = [
            {"id": 7 * n + 1, "file_name": p.path.name, "width": p.width, "height": p.height}
            for n, p in enumerate(split.pictures)
        ]
        objects = [
            {"id": 100 * n + m, "image_id": 7 * n + 1, "category_id": 10 * label, "bbox": [a, b, c - a, d - b], "iscrowd": 0}
            for n, p in enumerate(split.pictures)
            for m, ((a, b, c, d), label) in enumerate(zip(p.boxes, p.labels, strict=True))
        ]
        categories = [{"id": 10 * n, "name": label} for n, label in enumerate(split.classes, 1)]
        data = {"images": images, "annotations": objects, "categories": categories}
        (to / "annotations" / f"instances_{name}.json").write_text(json.dumps(data))
        (to / name).symlink_to(root / "JPEGImages")
    return to


def test_both_layouts_say_the_same(shapes: Path, tmp_path: Path) -> None:
    first, second = voc.load(shapes), coco.load(as_coco(shapes, tmp_path / "coco"))
    assert first[0].classes == second[0].classes == list(CLASSES)
    for one, other in zip(first, second, strict=True):
        assert [p.boxes for p in one.pictures] == [p.boxes for p in other.pictures]
        assert [p.labels for p in one.pictures] == [p.labels for p in other.pictures]
    assert len(first[0].pictures) == 6 and len(first[1].pictures) == 3
    assert voc.load(shapes.parent)[0].classes == list(CLASSES)  # the folder around it will do


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("square", 90, 5, 99, 20), r"image1\.xml, object 2 \(square\): the box \(90, 5, 99, 20\) exceeds its image.*96x80"),
        (("square", 30, 5, 20, 20), r"image1\.xml, object 2 \(square\): invalid box \(30, 5, 20, 20\)"),
        (("cube", 1, 5, 20, 20), r"image7\.xml|image1\.xml, object 2 \(cube\): unknown class 'cube'"),
        (("", 1, 5, 20, 20), r"image1\.xml, object 2: there is no <name>"),
        (("square", "left", 5, 20, 20), r"image1\.xml, object 2 \(square\): <bndbox> has"),
    ],
)
def test_bad_objects_are_named(shapes: Path, entry: tuple[str, float, float, float, float], message: str) -> None:
    (shapes / "classes.txt").write_text("disc\nsquare\n")
    rewrite(shapes, ("disc", 1, 1, 9, 9), entry)
    with pytest.raises(ValueError, match=message):
        voc.load(shapes)


def test_boxes_without_area_are_left_out_with_a_warning(shapes: Path) -> None:
    rewrite(shapes, ("disc", 1, 1, 9, 9), ("square", 5, 5, 5, 20), ("square", 60, 5, 60.0000001, 20))
    with pytest.warns(UserWarning, match=r"dropped 2 boxes without area: .*image1\.xml, object 2.*object 3"):
        train, _ = voc.load(shapes)
    assert train.pictures[1].boxes == [(1, 1, 9, 9)]


def test_missing_files_are_named(shapes: Path, tmp_path: Path) -> None:
    other = as_coco(shapes, tmp_path / "coco")
    (shapes / "JPEGImages" / "image2.png").unlink()
    with pytest.raises(ValueError, match=r"image2\.xml: the image .*image2\.png is missing"):
        voc.load(shapes)
    with pytest.raises(ValueError, match=r"instances_train2017\.json, image 15 \(image2\.png\): the image .* is missing"):
        coco.load(other)
    (shapes / "Annotations" / "image0.xml").unlink()
    with pytest.raises(ValueError, match=r"image0\.xml: the annotation is missing"):
        voc.load(shapes)
    for kind in ("voc", "coco"):
        with pytest.raises(ValueError, match=f"{kind}:.*nowhere"):
            source.load(f"{kind}:{tmp_path / 'nowhere'}", 64, True, 0)
    with pytest.raises(ValueError, match="unknown data set for detection 'digits'"):
        source.load("digits", 64, True, 0)


def test_a_coco_object_of_no_image_or_category(shapes: Path, tmp_path: Path) -> None:
    root = as_coco(shapes, tmp_path / "coco")
    file = root / "annotations" / "instances_train2017.json"
    data = json.loads(file.read_text())
    for key, value, message in (("category_id", 33, "unknown class 'category_id 33'"), ("image_id", 5, "image_id 5")):
        changed = {**data, "annotations": [{**data["annotations"][3], key: value}]}
        file.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=f"object {data['annotations'][3]['id']}.*{message}"):
            coco.load(root)


def changed(root: Path, split: str, **lists: object) -> None:
    file = root / "annotations" / f"instances_{split}2017.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **lists}))


@pytest.mark.parametrize(
    ("split", "lists", "message"),
    [
        (
            "val",
            {"categories": [{"id": 10, "name": "square"}, {"id": 20, "name": "disc"}]},
            "category 10 is 'square', but in .* it is",
        ),
        ("val", {"categories": [{"id": 30, "name": "cube"}]}, "category 30 is 'cube', but in .* there is no such category"),
        (
            "train",
            {"categories": [{"id": 10, "name": "a"}, {"id": 20, "name": "a"}]},
            "there are two classes 'a'|category 10",
        ),
        ("train", {"categories": [{"id": [1], "name": "a"}]}, "a category has no id or no name"),
        ("train", {"images": [{"file_name": "x.png", "width": 3, "height": 3}]}, "'id' is missing"),
        ("train", {"images": None}, "there is no list of images"),
        ("train", {"annotations": [3]}, "there is no list of annotations"),
        (
            "train",
            {"annotations": [{"id": 4, "image_id": [1], "category_id": 10}]},
            r"object 4: the file has no image with the image_id \[1\]",
        ),
        ("val", {"annotations": []}, "no image of the test split has an object"),
    ],
)
def test_a_broken_coco_file_is_named(shapes: Path, tmp_path: Path, split: str, lists: dict[str, object], message: str) -> None:
    root = as_coco(shapes, tmp_path / "coco")
    changed(root, split, **lists)
    with pytest.raises(ValueError, match=message):
        source.load(f"coco:{root}", 64, True, 0)


def test_a_crowd_is_scored_but_not_trained_on(shapes: Path, tmp_path: Path) -> None:
    root = as_coco(shapes, tmp_path / "coco")
    file = root / "annotations" / "instances_train2017.json"
    objects = json.loads(file.read_text())["annotations"]
    first = [entry for entry in objects if entry["image_id"] == 1]
    crowd = {**first[0], "id": 999, "iscrowd": 1}
    changed(root, "train", annotations=[*objects, crowd])
    data = source.load(f"coco:{root}", 64, False, 0)
    assert coco.load(root)[0].pictures[0].crowd == [False] * len(first) + [True]
    ((_, targets),) = data.train.batches([torch.tensor([0])], 0, 0)
    assert len(targets[0]["boxes"]) == len(first)


def test_images_depend_on_seed_epoch_and_index_only(shapes: Path) -> None:
    def images(workers: int, epoch: int, augment: bool = True) -> list[torch.Tensor]:
        split = source.load(f"voc:{shapes}", 64, augment, workers).train
        batches = split.batches([torch.tensor([0, 3]), torch.tensor([5])], 1, epoch)
        return [tensor for xs, ts in batches for x, t in zip(xs, ts, strict=True) for tensor in (x, t["boxes"])]

    state = torch.get_rng_state()
    first = images(0, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, images(2, 0), strict=True))
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(first, images(0, 1), strict=True))
    plain = images(0, 0, augment=False)
    assert all(torch.equal(a, b) for a, b in zip(plain, images(0, 1, augment=False), strict=True))
    assert plain[0].shape == (3, 80, 96) and plain[0].dtype == torch.float32 and 0.0 <= plain[0].min() < plain[0].max() <= 1.0
    assert torch.equal(state, torch.get_rng_state())


def test_an_image_of_another_size_than_its_annotation_says(shapes: Path) -> None:
    (shapes / "Annotations" / "image1.xml").write_text(annotation("image1.png", (90, 80), [("disc", 1, 1, 9, 9)]))
    with pytest.raises(ValueError, match=r"image1\.png has 96x80 pixels, but its annotation says 90x80"):
        list(source.load(f"voc:{shapes}", 64, True, 0).train.batches([torch.tensor([1])], 0, 0))


def found(boxes: list[list[float]], labels: list[int], scores: list[float]) -> dict[str, torch.Tensor]:
    return {"boxes": torch.tensor(boxes).reshape(-1, 4), "labels": torch.tensor(labels), "scores": torch.tensor(scores)}


def test_scores_of_known_detections() -> None:
    pictures = [
        Picture(Path("a"), 50, 50, [(0, 0, 20, 20), (30, 30, 40, 40)], [1, 2], [False, False]),
        Picture(Path("b"), 50, 50, [(5, 5, 25, 25)], [1], [False]),
    ]
    split = Split(pictures, ["one", "two", "never"])
    right = {
        0: found([[0, 0, 20, 20], [30, 30, 40, 40]], [1, 2], [0.9, 0.8]),
        1: found([[5, 5, 25, 25]], [1], [0.7]),
    }
    scores = metrics.score(split, right)
    assert (scores.mAP, scores.AP50, scores.AP75) == pytest.approx((1.0, 1.0, 1.0))
    assert scores.per_class["one"] == pytest.approx(1.0) and scores.per_class["never"] != scores.per_class["never"]
    # Class "two" shifted by a quarter: an IoU of 7.5*10/(200-75) = 0.6 counts at 50, 55 and 60 % of ten overlaps.
    shifted = {**right, 0: found([[0, 0, 20, 20], [32.5, 30, 42.5, 40]], [1, 2], [0.9, 0.8])}
    scores = metrics.score(split, shifted)
    assert pytest.approx(1.0) == scores.AP50 and pytest.approx(0.5) == scores.AP75
    assert scores.per_class["two"] == pytest.approx(0.3, abs=0.11)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nothing = metrics.score(split, {0: found([], [], []), 1: found([], [], [])})
    assert nothing.mAP == 0.0 and nothing.per_class["two"] == 0.0
    assert nothing.per_class["never"] != nothing.per_class["never"], "a class without objects has no score, found or not"
    assert "mAP 0.00%" in str(nothing) and "AP of never none" in str(nothing)
