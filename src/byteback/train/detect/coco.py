# SPDX-License-Identifier: Apache-2.0
"""coco:PATH, the layout of COCO:

    PATH/annotations/instances_train*.json, instances_val*.json     PATH/train*/IMAGE, PATH/val*/IMAGE (or PATH/images/IMAGE)

Classes are the categories in the order of their ids. Boxes around crowds are used by the score, but not for training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from byteback.train.checkpoints import files
from byteback.train.detect.annotations import Box, Checks, Picture, Split, existing

Id = int | str  # COCO's own are integers; some tools write names


def load(path: Path) -> tuple[Split, Split]:
    """Reads the training and the test split."""
    train, test = (_file(path, split) for split in ("train", "val"))
    first, second = _read(train), _read(test)
    classes = _classes(train, first)
    for number, name in _classes(test, second).items():
        if classes.get(number) != name:
            known = f"it is {classes[number]!r}" if number in classes else "there is no such category"
            raise ValueError(
                f"{test}: category {number} is {name!r}, but in {train.name} {known}. Both files need the same categories."
            )
    checks = Checks(f"coco:{path}", list(classes.values()))
    splits = [Split(_pictures(path, *pair, checks, classes), checks.classes) for pair in ((train, first), (test, second))]
    checks.finish()
    return splits[0], splits[1]


def _file(path: Path, split: str) -> Path:
    found = sorted((path / "annotations").glob(f"instances_{split}*.json"))
    if not found:
        raise ValueError(
            f"coco:{path}: there is no annotations/instances_{split}*.json. Give the folder with annotations and images."
        )
    return found[-1]


def _read(file: Path) -> dict[str, Any]:
    text = files.read_text(file)
    try:
        data = files.from_json(text)
    except ValueError as error:
        raise ValueError(f"{file}: this is not JSON: {error}.") from error
    lists = {key: data.get(key) if isinstance(data, dict) else None for key in ("images", "annotations", "categories")}
    for key, entries in lists.items():
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError(f"{file}: there is no list of {key} with their fields, so it is not a file of COCO instances.")
    return lists


def _classes(file: Path, data: dict[str, Any]) -> dict[Id, str]:
    try:
        return dict(sorted((_id(entry["id"]), str(entry["name"])) for entry in data["categories"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: a category has no id or no name ({error}). Correct it.") from error


def _id(value: Any) -> Id:
    if not isinstance(value, Id):
        raise TypeError(f"id is {value!r}")
    return value


def _pictures(path: Path, file: Path, data: dict[str, Any], checks: Checks, classes: dict[Id, str]) -> list[Picture]:
    folders = [path / file.stem.removeprefix("instances_"), path / "images", path]
    pictures: dict[Id, Picture] = {}
    for entry in data["images"]:
        where = f"{file}, image {entry.get('id')} ({entry.get('file_name')})"
        try:
            number, name, size = _id(entry["id"]), str(entry["file_name"]), (int(entry["width"]), int(entry["height"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{where}: {error} is missing; id, file_name, width and height are required. Correct it."
            ) from error
        image = next((folder / name for folder in folders if (folder / name).is_file()), folders[0] / name)
        pictures[number] = Picture(existing(image, where), *size)
    if not pictures:
        raise ValueError(f"{file}: it lists no image.")
    for entry in data["annotations"]:
        where = f"{file}, object {entry.get('id')}"
        image, kind = entry.get("image_id"), entry.get("category_id")
        if not isinstance(image, Id) or image not in pictures:
            raise ValueError(f"{where}: the file has no image with the image_id {image}. Correct it.")
        name = classes.get(kind, f"category_id {kind}") if isinstance(kind, Id) else f"category_id {kind}"
        checks.add(pictures[image], where, name, _box(entry, where), bool(entry.get("iscrowd", 0)))
    return list(pictures.values())


def _box(entry: dict[str, Any], where: str) -> Box:
    try:
        x, y, width, height = map(float, entry["bbox"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: bbox is {entry.get('bbox')}, not four numbers x, y, width, height.") from error
    return x, y, x + width, y + height
