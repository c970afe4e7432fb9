# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: everything a member needs to resume bit for bit, in one file that is replaced atomically.

    model       weights and buffers, including the state of the quantizers: clips, noise counters, iterations
    optimizer   momentum
    random      the state of torch's generator, which dropout uses
    average     of --ema
    progress    epoch and step, and the sums of the current epoch
    lengths     of the journals; a resumed run truncates them to these
    class_names if the data set has names for its classes: `eval` checks them

Learning rate, data order and augmentation are functions of seed, step, epoch and index, so they need no state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from byteback.train.checkpoints import files
from byteback.train.checkpoints.files import Damaged

FORMAT = 1
LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"
_NAMED = 8  # how many classes a message lists
_FIELDS: dict[str, Any] = {  # and their types; older checkpoints have no "images" and no "frames"
    **{"config": str, "variant": str, "recipe": (dict, type(None)), "seed": int, "classes": int, "image_size": int},
    **{"channels": int, "model": dict, "optimizer": dict, "random": Tensor, "progress": dict, "lengths": dict},
}


@dataclass
class Progress:
    """The progress of a member: `in_epoch` batches of epoch `epoch` are done, and `step` batches in total."""

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
    log_seconds: float = 0.0  # this and the following are times, which differ from run to run
    seconds: float = 0.0
    wait_seconds: float = 0.0
    total_seconds: float = 0.0
    speeds: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


_TIMES = ("log_seconds", "seconds", "wait_seconds", "total_seconds", "speeds", "waits")


def save(path: Path, contents: dict[str, Any]) -> None:
    """Writes a checkpoint atomically. The last checkpoint before it is kept as `previous.pt`."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **contents}, buffer)
    files.replace(path, buffer.getvalue(), keep=path.with_name(PREVIOUS) if path.name == LAST else None)


def exists(folder: Path) -> bool:
    """Whether the member in this folder has a checkpoint to go on from."""
    return (folder / LAST).exists() or (folder / PREVIOUS).exists()


def newest(folder: Path, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """Returns the newest complete checkpoint of a member: the last one, or else the one before it. None if there is none."""
    last, previous = folder / LAST, folder / PREVIOUS
    if not last.exists():
        return (previous, load(previous)) if previous.exists() else None
    try:
        return last, load(last)
    except Damaged as error:
        if not previous.exists():
            raise
        contents = load(previous)
        now = progress_of(contents)
        say(f"{error.args[0]}\nGoing on from the checkpoint before it, {previous}: epoch {now.epoch + 1}, step {now.step}.")
        return previous, contents


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint. Raises an error if the file is truncated, damaged, or not a checkpoint of the trainer."""
    advice = (
        f"Replace it by {BEST} of the same folder, which is also a complete checkpoint, or remove it with {PREVIOUS} to train "
        "this member from the start."
        if path.name in (LAST, PREVIOUS)
        else "Choose another checkpoint."
    )
    contents = read(path, advice)
    if not isinstance(contents, dict) or "progress" not in contents:
        raise Damaged(f"{path}: this is not a checkpoint of `byteback train`: it has no progress. {advice}")
    if contents.get("format") != FORMAT:
        found = contents.get("format")
        what = "Install a newer byteback." if isinstance(found, int) and found > FORMAT else advice
        raise Damaged(f"{path}: the checkpoint has format {found}, but this build reads {FORMAT}. {what}")
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(contents.get(name), kind)]
    if wrong:
        raise Damaged(f"{path}: this is not a complete checkpoint: {', '.join(wrong)} missing or of another type. {advice}")
    try:
        progress_of(contents)
    except TypeError as error:
        raise Damaged(f"{path}: its progress has other fields than this build writes: {error}. {advice}") from error
    return contents


def read(path: Path, advice: str = "Choose another file.") -> Any:
    """Reads a file that torch.save wrote, after its checksums are verified. Code that the file may contain is never run."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                wrong = archive.testzip()  # torch.load does not verify the checksums
            if wrong is not None:
                raise zipfile.BadZipFile(f"the checksum of {wrong} is wrong")
        else:
            _check_by_name(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles that torch.save did not write
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise Damaged(f"{path}: no such checkpoint.") from error
    except OSError as error:
        raise Damaged(f"{path}: the checkpoint cannot be read: {error.strerror or error}. {advice}") from error
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))  # PyTorch's own message advises to load the file all the same
        if zipfile.is_zipfile(path):
            what = f"the Python object {found[1]}" if found else "Python objects"
        elif foreign := _foreign(path):
            what = f"the Python object {foreign}"
        else:
            raise Damaged(f"{path}: the checkpoint is damaged or truncated. {advice}") from error
        raise Damaged(
            f"{path}: the file contains {what}, not only tensors and plain data. Loading it could run code that somebody "
            f"else has put there, so it is not loaded. {advice}"
        ) from error
    except Exception as error:  # zipfile and torch raise different errors for a damaged file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise Damaged(f"{path}: the checkpoint is damaged or truncated: {reason}. {advice}") from error


def _foreign(path: Path) -> str:
    """Returns the first function or class that a bare pickle names and torch.load does not know, or "". Nothing is run."""
    texts: list[str] = []
    with contextlib.suppress(Exception), open(path, "rb") as file:  # pickletools raises different errors for other files
        while True:  # torch.save wrote several pickles, one after the other
            for code, value, _ in pickletools.genops(file):
                if isinstance(value, str):
                    texts.append(value)
                if code.name in ("GLOBAL", "STACK_GLOBAL"):
                    module, name = texts[-1].split(" ") if code.name == "GLOBAL" else texts[-2:]
                    if module.partition(".")[0] not in ("torch", "collections"):
                        return f"{module}.{name}"
    return ""


def _check_by_name(path: Path) -> None:
    """Checks the hash in a name such as resnet18-f37072fd.pth: files of the old format have no checksums."""
    named = re.search(r"-([0-9a-f]{8,64})\.pth?$", path.name)
    if named is not None:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if not found.startswith(named[1]):
            raise zipfile.BadZipFile(f"its sha256 begins with {found[: len(named[1])]}, but its name says {named[1]}")


def must_know(contents: dict[str, Any], data: str, classes: int, names: Sequence[str]) -> None:
    """Raises an error if a data set has other classes than the checkpoint. Class names are compared if both have them."""
    known = contents.get("class_names") or ()
    number = contents["classes"] + len(names) - classes if names else contents["classes"]  # without the background
    if contents["classes"] != classes or (known and names and list(known) != list(names)):
        raise ValueError(
            f"eval: the checkpoint was trained on {_classes(number, known)}, but {data} has "
            f"{_classes(len(names) or classes, names)}. Choose a data set with the same classes."
        )


def _classes(number: int, names: Sequence[str]) -> str:
    """
    >>> _classes(2, ["cat", "dog"])
    '2 classes (cat, dog)'
    """
    shown = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"{number} classes" + (f" ({shown})" if shown else "")


def tested_state(contents: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of the network that was tested: the average of --ema, or the trained one."""
    average: dict[str, Any] = contents.get("average", {})
    state: dict[str, Any] = contents["model"]
    return {key.removeprefix("module."): value for key, value in average.items() if key.startswith("module.")} or state


def progress_of(contents: dict[str, Any]) -> Progress:
    """Returns the progress that is stored in a checkpoint."""
    return Progress(**contents["progress"])


def fingerprint(contents: dict[str, Any]) -> str:
    """Returns the sha256 of everything in a checkpoint that training depends on: not of times and lengths of files."""
    digest = hashlib.sha256()
    progress = {name: value for name, value in contents["progress"].items() if name not in _TIMES}
    parts = [part for part in ("model", "optimizer", "random", "average") if part in contents]
    _add(digest, {"progress": progress, **{part: contents[part] for part in parts}})
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
    """Returns the progress as plain data."""
    return dataclasses.asdict(progress)
