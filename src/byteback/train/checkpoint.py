# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: all that a member needs to go on bit for bit, in one file that is replaced whole or not at all.

    model       weights and buffers, the quantizers' state among them: clips, noise counters, iterations
    optimizer   momentum
    random      torch's generator, which dropout draws from
    progress    how far it is, and the sums of the epoch that is under way
    lengths     of the journals; a resumed run cuts them there
    class_names where the data set has names for its classes: `eval` refuses another one

Learning rate, data order and augmentation are functions of seed, step, epoch and index, so there is nothing to store.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from byteback.train import files

FORMAT = 1
LAST, BEST = "last.pt", "best.pt"
_NAMED = 8  # classes that a message names


@dataclass
class Progress:
    """How far a member is. `in_epoch` batches of epoch `epoch` are done, `step` of all."""

    epoch: int = 0
    in_epoch: int = 0
    step: int = 0
    loss: float = 0.0  # sums over the images of this epoch
    correct: int = 0
    images: int = 0
    log_loss: float = 0.0  # sums since the last record
    log_correct: int = 0
    log_images: int = 0
    train_loss: float = 0.0  # of the last epoch
    test_loss: float = 0.0
    test_accuracy: float = 0.0
    best_accuracy: float = -1.0
    skipped: int = 0
    log_seconds: float = 0.0  # from here on times, which differ from run to run
    seconds: float = 0.0
    wait_seconds: float = 0.0
    total_seconds: float = 0.0
    speeds: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


_TIMES = ("log_seconds", "seconds", "wait_seconds", "total_seconds", "speeds", "waits")


def save(path: Path, contents: dict[str, Any]) -> None:
    """Writes a checkpoint atomically."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **contents}, buffer)
    files.replace(path, buffer.getvalue())


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint, and refuses one that is cut short, damaged, or none of ours."""
    advice = (
        f"Remove it to train this member from its start, or put {BEST} of the same folder in its place: that one is "
        "complete as well."
        if path.name == LAST
        else "Name another one."
    )
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load would not look at the checksums
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such checkpoint.") from error
    except OSError as error:
        raise ValueError(f"{path}: the checkpoint cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # zipfile, pickle and torch each have their own for a damaged file
        raise ValueError(f"{path}: the checkpoint is damaged or cut short: {str(error).splitlines()[0]}. {advice}") from error
    if not isinstance(contents, dict) or "progress" not in contents:
        raise ValueError(f"{path}: this is no checkpoint of `byteback train`: it has no progress. {advice}")
    if contents["format"] != FORMAT:
        raise ValueError(f"{path}: the checkpoint has format {contents['format']}, this build reads {FORMAT}. {advice}")
    return contents


def must_know(contents: dict[str, Any], data: str, classes: int, names: Sequence[str]) -> None:
    """Refuses a data set with other classes than the checkpoint was trained on. Not every data set has names for them."""
    known = contents.get("class_names") or ()
    number = contents["classes"] + len(names) - classes if names else contents["classes"]  # without the background
    if contents["classes"] != classes or (known and names and list(known) != list(names)):
        raise ValueError(
            f"eval: the checkpoint knows {_classes(number, known)}, but {data} has {_classes(len(names) or classes, names)}. "
            "Choose a data set with the classes that it was trained on."
        )


def _classes(number: int, names: Sequence[str]) -> str:
    """
    >>> _classes(2, ["cat", "dog"])
    '2 classes (cat, dog)'
    """
    shown = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"{number} classes" + (f" ({shown})" if shown else "")


def progress_of(contents: dict[str, Any]) -> Progress:
    """The progress that a checkpoint stores."""
    return Progress(**contents["progress"])


def fingerprint(contents: dict[str, Any]) -> str:
    """sha256 of everything in a checkpoint that training goes on from; times and lengths of files are left out."""
    digest = hashlib.sha256()
    progress = {name: value for name, value in contents["progress"].items() if name not in _TIMES}
    _add(digest, {"progress": progress, **{part: contents[part] for part in ("model", "optimizer", "random")}})
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _add(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(digest, item)
    else:
        digest.update(json.dumps(value).encode())


def as_data(progress: Progress) -> dict[str, Any]:
    """Progress as plain data."""
    return dataclasses.asdict(progress)
