# SPDX-License-Identifier: Apache-2.0
"""Clips on disk: finds the files and their labels, and reads the frames.

    frames:PATH   PATH/CLASS/CLIP/FRAME.png, a folder of images per clip, in the order of their numbers or names
    clips:PATH    PATH/CLASS/CLIP.mp4, or PATH/labels.csv with the columns file, label and optionally split

CLASS may be in PATH/train and PATH/val (or test). Without these, every fifth clip of a class is a test clip. Videos are decoded
with PyAV. An image instead of a video is a sheet of 4x4 frames, row by row.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from byteback.train.data import draws, pictures

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
    """The classes and the clips of both splits."""

    classes: list[str]
    train: list[Clip]
    test: list[Clip]


def find(kind: str, path: Path) -> Listing:
    """Finds the clips of frames:PATH or clips:PATH. Raises an error for any other layout."""
    if not path.is_dir():
        raise ValueError(f"{kind}:{path}: there is no folder {path}. Check its name.")
    if kind == "clips" and (path / "labels.csv").is_file():
        return _from_table(path)
    tests = next((path / name for name in _TESTS if (path / name).is_dir()), None)
    if (path / "train").is_dir() != (tests is not None):
        raise ValueError(f"{kind}:{path}: there is only one of the folders train and val. Create both, or none.")
    if tests is None:
        found = _in_classes(kind, path, path)
        return Listing(list(found), *_parted(found.values()))
    train, test = _in_classes(kind, path, path / "train"), _in_classes(kind, path, tests)
    if list(train) != list(test):
        differ = sorted(set(train) ^ set(test))
        raise ValueError(
            f"{kind}:{path}: the classes of train and {tests.name} differ: {', '.join(differ[:5])}. Make them equal."
        )
    return Listing(list(train), _flat(train.values()), _flat(test.values()))


def _in_classes(kind: str, path: Path, folder: Path) -> dict[str, list[Clip]]:
    """Returns the clips by class, sorted by name."""
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
        raise ValueError(f"{kind}:{path}: {folder} has {len(found)} classes; a classifier needs two or more.")
    return found


def _is_clip(kind: str, entry: Path) -> bool:
    if entry.name.startswith("."):
        return False
    return entry.is_dir() if kind == "frames" else entry.suffix.lower() in (*VIDEOS, *IMAGES)


def _from_table(path: Path) -> Listing:
    where = path / "labels.csv"
    try:
        with where.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{where}: this is not a table of comma-separated values in UTF-8: {error}.") from error
    if not rows or not {"file", "label"} <= rows[0].keys():
        raise ValueError(f"{where}: the table must have the columns file and label, and a row for every clip.")
    for line, row in enumerate(rows, start=2):
        if not row["file"] or not row["label"]:
            raise ValueError(f"{where}, line {line}: the file or the label is missing. Add it, or remove the line.")
    labels = sorted({row["label"] for row in rows}, key=lambda label: (len(label), label))  # numbers by their value
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
            raise ValueError(f"{where}, line {line}: split is {split!r}; it must be train, val or test.")
        splits["train" if split == "train" else "test"].append(clip)
    if "split" not in rows[0]:
        return Listing([names[label] for label in labels], *_parted(by_class.values()))
    if not splits["train"] or not splits["test"]:
        raise ValueError(f"{where}: the column split leaves train or test empty. Both need clips.")
    unseen = set(range(len(labels))) - {clip.label for clip in splits["train"]}
    if unseen:
        raise ValueError(f"{where}: no training clip has the label {labels[min(unseen)]!r}. Add some.")
    return Listing([names[label] for label in labels], splits["train"], splits["test"])


def _parted(classes: Iterable[list[Clip]]) -> tuple[list[Clip], list[Clip]]:
    train: list[Clip] = []
    test: list[Clip] = []
    for clips in classes:
        if len(clips) < 2:
            raise ValueError(
                f"data: {clips[0].path} is the only clip of its class; training and test need one each. Add clips."
            )
        for number, clip in enumerate(clips):
            (test if number % _EVERY == 1 else train).append(clip)
    return train, test


def _flat(classes: Iterable[list[Clip]]) -> list[Clip]:
    return [clip for clips in classes for clip in clips]


# ---- frames ----


def choose(total: int, frames: int, stride: int, random: np.ndarray | None) -> list[int]:
    """Returns which of `total` frames to use: from the middle, or from a random start. A short clip repeats its last frame.

    >>> choose(10, 3, 2, None)
    [2, 4, 6]
    >>> choose(2, 3, 1, None)
    [0, 1, 1]
    """
    spare = max(total - (frames - 1) * stride, 1)  # possible starts
    start = (spare - 1) // 2 if random is None else int(draws.below(random, spare))
    return [min(start + i * stride, total - 1) for i in range(frames)]


def in_time(name: str) -> tuple[tuple[int, str], ...]:
    """The key to sort names of frames by: numbers in them are compared by value, with or without leading zeros.

    >>> sorted(["frame10.png", "frame9.png", "frame1.png"], key=in_time)
    ['frame1.png', 'frame9.png', 'frame10.png']
    """
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), part) if part.isascii() and part.isdigit() else (0, part) for part in parts)


def images_of(path: Path) -> list[Path]:
    """Returns the image files of a clip, in time: its frames, or its sheet; none for a video."""
    if not path.is_dir():
        return [path] if path.suffix.lower() in IMAGES else []
    images = (file for file in path.iterdir() if file.suffix.lower() in IMAGES and not file.name.startswith("."))
    return sorted(images, key=lambda file: in_time(file.name))


def read(path: Path, frames: int, stride: int, random: np.ndarray | None) -> np.ndarray:
    """Reads a clip as (frames, height, width, 3) uint8. Raises a ValueError that names the file if it cannot be read."""
    if path.is_dir():
        files = images_of(path)
        if not files:
            raise ValueError(f"{path} contains no image. Add its frames, or remove the folder.")
        pictures = [_image(files[i]) for i in choose(len(files), frames, stride, random)]
        odd = next((i for i, picture in enumerate(pictures) if picture.shape != pictures[0].shape), None)
        if odd is not None:
            raise ValueError(
                f"{path}: the frames differ in size: {pictures[0].shape[:2]} and {pictures[odd].shape[:2]}. Make them equal."
            )
        return np.stack(pictures)
    if path.suffix.lower() in IMAGES:
        sheet = _image(path)
        height, width = sheet.shape[0] // SHEET, sheet.shape[1] // SHEET
        if sheet.shape[:2] != (height * SHEET, width * SHEET):
            raise ValueError(f"{path} has {sheet.shape[0]}x{sheet.shape[1]} pixels, which is not a sheet of 4x4 equal frames.")
        cells = sheet.reshape(SHEET, height, SHEET, width, 3).swapaxes(1, 2).reshape(-1, height, width, 3)
        return np.ascontiguousarray(cells[choose(len(cells), frames, stride, random)])
    return _video(path, frames, stride, random)


def _image(file: Path) -> np.ndarray:
    return np.asarray(pictures.read(file))


def av() -> Any:
    """Returns PyAV. Raises an error that says how to install it if it is missing."""
    try:
        import av as package  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ImportError(
            "clips: video files are decoded with PyAV, which is not installed. Install it: pip install 'byteback[video]'; or "
            "extract the frames and use frames:PATH.",
            name="av",
        ) from error
    return package


def _video(path: Path, frames: int, stride: int, random: np.ndarray | None) -> np.ndarray:
    package = av()
    try:
        with package.open(str(path)) as container:
            total = sum(1 for _ in container.decode(video=0))  # the number in the header is often wrong
        if total == 0:
            raise ValueError("it has no frames")
        wanted = choose(total, frames, stride, random)
        kept: dict[int, np.ndarray] = {}
        with package.open(str(path)) as container:
            for number, frame in enumerate(container.decode(video=0)):
                if number in wanted:
                    kept[number] = frame.to_ndarray(format="rgb24")
                if number >= wanted[-1]:
                    break
    except Exception as error:  # PyAV has a different error for every error of FFmpeg
        raise ValueError(f"{path} cannot be decoded: {error}.") from error
    return np.stack([kept[number] for number in wanted])
