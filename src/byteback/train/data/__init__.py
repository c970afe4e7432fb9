# SPDX-License-Identifier: Apache-2.0
"""Data sets: `load` loads one by its name.

`source.py` defines the interface of a data set, `draws.py` makes random numbers for each image. `embedded.py`, `downloaded.py`
and `folder.py` are the three kinds of image data sets, `moving_items.py` and `clips.py` those of video.
"""

from __future__ import annotations

import os
from pathlib import Path

from byteback.suggestions import unknown
from byteback.train.data.clips import clips
from byteback.train.data.downloaded import downloaded, found
from byteback.train.data.embedded import digits
from byteback.train.data.folder import folder
from byteback.train.data.moving_items import moving_items
from byteback.train.data.source import Batch, Data, DataError, Part, Source

__all__ = ["Batch", "Data", "DataError", "Part", "Source", "load", "root", "state", "NAMES"]

NAMES = ("digits", "cifar10", "cifar100", "fashion-mnist")
VARIABLE = "BYTEBACK_DATA"


def root(data_path: str | None = None) -> Path:
    """Returns the folder of the data sets."""
    return Path(data_path or os.environ.get(VARIABLE) or "data")


def load(
    name: str,
    data_path: str | None = None,
    *,
    image_size: int | None = None,
    augment: bool = True,
    download: bool = True,
    workers: int = 0,
    frames: int = 16,
    frame_stride: int = 1,
    skip_bad_images: bool = False,
) -> Data:
    """Loads the data set `name`. The default of `image_size` depends on the data set."""
    kind, colon, path = name.partition(":")
    if kind == "folder" and path:
        return folder(Path(path), image_size or 224, augment, workers, skip_bad_images)
    if kind in ("frames", "clips") and path:
        return clips(kind, Path(path), frames, frame_stride, image_size or 112, augment, workers, skip_bad_images)
    if name == "moving-items":
        return moving_items(root(data_path), frames, image_size or 32, augment, download)
    if name not in NAMES:
        known = [*NAMES, "folder:PATH", "moving-items", "frames:PATH", "clips:PATH"]
        if Path(name).is_dir():
            raise ValueError(f"train: --data {name} is a folder; for images in folders of classes use --data folder:{name}.")
        raise unknown("train", "data set", name, known)
    if name == "digits":
        return digits(image_size or 8)
    return downloaded(name, root(data_path), augment, download)


def state(data_path: str | None = None) -> list[tuple[str, str]]:
    """Returns (name, its folder or that it is missing) of every data set with a name."""
    where = root(data_path)
    rows = [("digits", "embedded in scikit-learn")]
    rows += [(name, str(where) if found(name, where) else f"not in {where}") for name in NAMES[1:]]
    return rows
