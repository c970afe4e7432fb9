# SPDX-License-Identifier: Apache-2.0
"""Clips on disk: where they are, what their labels are, and how the frames of one are read.

    frames:PATH   PATH/CLASS/CLIP/FRAME.png, a folder of images per clip, in the order of their numbers or names
    clips:PATH    PATH/CLASS/CLIP.mp4, or PATH/labels.csv with the columns file and label (and perhaps split)

CLASS may lie in PATH/train and PATH/val (or test). Without them every fifth clip of a class is for the test. A video is decoded
by PyAV; an image in a video's place is a sheet of 4x4 frames, row by row.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from byteback.train.data import draws

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
VIDEOS = (".mp4", ".avi", ".mkv", ".webm", ".mov", ".mpg", ".mpeg", ".m4v")
SHEET = 4  # frames per side of a sheet
_TESTS = ("val", "test")
_EVERY = 5  # clips of a class per clip of the test


@dataclass(frozen=True)
class Clip:
    """One clip: its folder or file, and its class."""

    path: Path
    label: int


@dataclass(frozen=True)
class Listing:
    """What there is."""

    classes: list[str]
    train: list[Clip]
    test: list[Clip]


def find(kind: str, path: Path) -> Listing:
    """The clips of frames:PATH or clips:PATH; a layout that is none of the above is refused in one sentence."""
    if not path.is_dir():
        raise ValueError(f"{kind}:{path}: there is no folder {path}. Check its name.")
    if kind == "clips" and (path / "labels.csv").is_file():
        return _from_table(path)
    tests = next((path / name for name in _TESTS if (path / name).is_dir()), None)
    if (path / "train").is_dir() != (tests is not None):
        raise ValueError(f"{kind}:{path}: it has one of the folders train and val, but not the other. Make both, or neither.")
    if tests is None:
        found = _in_classes(kind, path, path)
        return Listing(list(found), *_parted(found.values()))
    train, test = _in_classes(kind, path, path / "train"), _in_classes(kind, path, tests)
    if list(train) != list(test):
        differ = sorted(set(train) ^ set(test))
        raise ValueError(f"{kind}:{path}: the classes of train and {tests.name} differ in {', '.join(differ[:5])}. Align them.")
    return Listing(list(train), _flat(train.values()), _flat(test.values()))


def _in_classes(kind: str, path: Path, folder: Path) -> dict[str, list[Clip]]:
    """Class by class, in the order of names."""
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    found: dict[str, list[Clip]] = {}
    for label, place in enumerate(classes):
        clips = sorted(entry for entry in place.iterdir() if _is_clip(kind, entry))
        if not clips:
            what = "folder of frames" if kind == "frames" else "video"
            example = "CLIP/FRAME.png" if kind == "frames" else "CLIP.mp4"
            raise ValueError(f"{kind}:{path}: {place} has no {what}. The layout is {folder}/CLASS/{example}.")
        found[place.name] = [Clip(clip, label) for clip in clips]
    if len(found) < 2:
        raise ValueError(f"{kind}:{path}: {folder} has {len(found)} folders of classes; a classifier needs two or more.")
    return found


def _is_clip(kind: str, entry: Path) -> bool:
    if entry.name.startswith("."):
        return False
    return entry.is_dir() if kind == "frames" else entry.suffix.lower() in (*VIDEOS, *IMAGES)


def _from_table(path: Path) -> Listing:
    where = path / "labels.csv"
    with where.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets put a mark before the first letter
        rows = list(csv.DictReader(file))
    if not rows or not {"file", "label"} <= rows[0].keys():
        raise ValueError(f"{where}: it must have the columns file and label, and a row for every clip.")
    for line, row in enumerate(rows, start=2):
        if not row["file"] or not row["label"]:
            raise ValueError(f"{where}, line {line}: it lacks the file or the label. Complete it, or remove the line.")
    labels = sorted({row["label"] for row in rows}, key=lambda label: (len(label), label))  # numbers by their size
    if len(labels) < 2:
        raise ValueError(f"{where}: every clip has the label {labels[0]!r}; a classifier needs two or more.")
    names = {row["label"]: row.get("class") or row["label"] for row in rows}
    by_class: dict[str, list[Clip]] = {label: [] for label in labels}
    splits: dict[str, list[Clip]] = {"train": [], "test": []}
    for line, row in enumerate(rows, start=2):
        clip = Clip(path / row["file"], labels.index(row["label"]))
        if not clip.path.is_file():
            raise ValueError(f"{where}, line {line}: there is no file {clip.path}. Correct the name, or remove the line.")
        by_class[row["label"]].append(clip)
        split = row.get("split") or "train"
        if split not in ("train", *_TESTS):
            raise ValueError(f"{where}, line {line}: split is {split!r}; it is train, val or test.")
        splits["train" if split == "train" else "test"].append(clip)
    if "split" not in rows[0]:
        return Listing([names[label] for label in labels], *_parted(by_class.values()))
    if not splits["train"] or not splits["test"]:
        raise ValueError(f"{where}: the column split leaves train or test empty. Give clips to both.")
    unseen = set(range(len(labels))) - {clip.label for clip in splits["train"]}
    if unseen:
        raise ValueError(f"{where}: no clip with the label {labels[min(unseen)]!r} is for training. Give it some.")
    return Listing([names[label] for label in labels], splits["train"], splits["test"])


def _parted(classes: Iterable[list[Clip]]) -> tuple[list[Clip], list[Clip]]:
    train: list[Clip] = []
    test: list[Clip] = []
    for clips in classes:
        if len(clips) < 2:
            raise ValueError(f"data: {clips[0].path} is alone in its class; training and test need one clip each. Add clips.")
        for number, clip in enumerate(clips):
            (test if number % _EVERY == 1 else train).append(clip)
    return train, test


def _flat(classes: Iterable[list[Clip]]) -> list[Clip]:
    return [clip for clips in classes for clip in clips]


# ---- frames ----


def choose(total: int, frames: int, stride: int, random: np.ndarray | None) -> list[int]:
    """Which frames of `total` a clip takes: from the middle, or from anywhere; a clip that is too short repeats its last.

    >>> choose(10, 3, 2, None)
    [2, 4, 6]
    >>> choose(2, 3, 1, None)
    [0, 1, 1]
    """
    spare = max(total - (frames - 1) * stride, 1)  # possible starts
    start = (spare - 1) // 2 if random is None else int(draws.below(random, spare))
    return [min(start + i * stride, total - 1) for i in range(frames)]


def in_time(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts names of frames: numbers in them count by their value, whether or not they are filled up with zeros.

    >>> sorted(["frame10.png", "frame9.png", "frame1.png"], key=in_time)
    ['frame1.png', 'frame9.png', 'frame10.png']
    """
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), part) if part.isascii() and part.isdigit() else (0, part) for part in parts)


def read(path: Path, frames: int, stride: int, random: np.ndarray | None) -> np.ndarray:
    """(frames, height, width, 3) uint8; a ValueError says what is wrong with which file."""
    if path.is_dir():
        images = (file for file in path.iterdir() if file.suffix.lower() in IMAGES and not file.name.startswith("."))
        files = sorted(images, key=lambda file: in_time(file.name))
        if not files:
            raise ValueError(f"{path} has no image. Put its frames there, or remove the folder.")
        pictures = [_image(files[i]) for i in choose(len(files), frames, stride, random)]
        odd = next((i for i, picture in enumerate(pictures) if picture.shape != pictures[0].shape), None)
        if odd is not None:
            raise ValueError(
                f"{path}: its frames have sizes {pictures[0].shape[:2]} and {pictures[odd].shape[:2]}. Make them equal."
            )
        return np.stack(pictures)
    if path.suffix.lower() in IMAGES:
        sheet = _image(path)
        height, width = sheet.shape[0] // SHEET, sheet.shape[1] // SHEET
        if sheet.shape[:2] != (height * SHEET, width * SHEET):
            raise ValueError(f"{path} has {sheet.shape[0]}x{sheet.shape[1]} pixels, which is no sheet of 4x4 equal frames.")
        cells = sheet.reshape(SHEET, height, SHEET, width, 3).swapaxes(1, 2).reshape(-1, height, width, 3)
        return np.ascontiguousarray(cells[choose(len(cells), frames, stride, random)])
    return _video(path, frames, stride, random)


def _image(file: Path) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(file) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:  # Pillow says of a broken PNG that its syntax is wrong
        raise ValueError(f"{file} cannot be read as an image: {error}. Repair or remove it.") from error


def av() -> Any:
    """PyAV, or an error that says how to do without."""
    try:
        import av as package  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ImportError(
            "clips: video files are decoded by PyAV, which is not installed. Install it: pip install 'byteback[video]'; or "
            "extract the frames and use frames:PATH.",
            name="av",
        ) from error
    return package


def _video(path: Path, frames: int, stride: int, random: np.ndarray | None) -> np.ndarray:
    package = av()
    try:
        with package.open(str(path)) as container:
            total = sum(1 for _ in container.decode(video=0))  # headers are often wrong about it
        if total == 0:
            raise ValueError("it has no frame")
        wanted = choose(total, frames, stride, random)
        kept: dict[int, np.ndarray] = {}
        with package.open(str(path)) as container:
            for number, frame in enumerate(container.decode(video=0)):
                if number in wanted:
                    kept[number] = frame.to_ndarray(format="rgb24")
                if number >= wanted[-1]:
                    break
    except Exception as error:  # PyAV has an error for everything that FFmpeg can say
        raise ValueError(f"{path} cannot be decoded: {error}. Repair or remove it.") from error
    return np.stack([kept[number] for number in wanted])
