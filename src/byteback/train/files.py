# SPDX-License-Identifier: Apache-2.0
"""Files that survive a crash: replaced whole or not at all, or cut back to a known length.

A checkpoint is written next to its place, forced to the disk, and then renamed: at every moment there is a whole one, the old
or the new. A journal (a file of JSON lines) only grows; a checkpoint knows how long it was, and a resumed run cuts it there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


def replace(path: Path, data: bytes) -> None:
    """Puts `data` into `path`, whole or not at all."""
    fresh = path.with_name(path.name + ".writing")
    try:
        with open(fresh, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        kept = f" The one of before is still there, in {path}." if path.exists() else ""
        raise OSError(
            f"{path} could not be written ({len(data) / 2**20:.1f} MB): {error.strerror or error}.{kept} Make room, "
            "or choose another place for it."
        ) from error


def replace_json(path: Path, value: Any) -> None:
    """The same with a value that JSON can say."""
    replace(path, json.dumps(_plain(value), allow_nan=False, separators=(",", ":")).encode())


def _sync_folder(folder: Path) -> None:
    """A rename is only safe on the disk once its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Creates the folder and proves that files can be written there."""
    trial = folder / ".trial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.write_bytes(b"")
        trial.unlink()
    except OSError as error:
        raise OSError(
            f"train: nothing can be written in {folder}: {error.strerror}. Choose another --output-dir, or change its "
            "permissions."
        ) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps a second process out of a run's folder; the lock goes with the process, however that ends."""
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RuntimeError(
                f"train: another process is training in {folder}. Wait for it, or choose another --output-dir."
            ) from error
        yield


class Journal:
    """A file of JSON lines that is cut to `length` and then only grows."""

    def __init__(self, path: Path, length: int = 0) -> None:
        self.path = path
        self._file: BinaryIO = open(path, "ab")  # noqa: SIM115 - open for the whole run
        there = self._file.tell()
        if there < length:
            raise ValueError(
                f"{path} has {there} bytes, but the checkpoint knows of {length}: somebody shortened it. Put it back, or "
                "remove the member's folder to train it again."
            )
        self._file.truncate(length)
        self._file.seek(0, os.SEEK_END)

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record."""
        try:
            self._file.write(json.dumps(_plain(record), allow_nan=False).encode() + b"\n")
            self._file.flush()  # so that one can watch it grow
        except OSError as error:
            raise self._failed(error) from error

    def synced(self) -> int:
        """The length, once all of it is on the disk."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        return self._file.tell()

    def _failed(self, error: OSError) -> OSError:
        return OSError(f"{self.path} could not be written: {error.strerror}. Make room; then go on with --resume.")

    def close(self) -> None:
        """Writes what is pending. A disk that is full was reported before."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a journal; a last line that was cut short is left out."""
    records = []
    if path.exists():
        for line in path.read_bytes().split(b"\n"):
            with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError):
                records.append(json.loads(line))
    return records


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity: both are null; floats keep 7 digits, as float32 has."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
