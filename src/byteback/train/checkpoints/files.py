# SPDX-License-Identifier: Apache-2.0
"""Files that survive a crash: replaced atomically, or truncated to a known length.

A checkpoint is written to a temporary file, synced to the disk, and renamed, so there is always a complete one, old or new. A
journal (a file of JSON lines) only grows. A checkpoint stores the length of the journals, and a resumed run truncates them.
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


class Damaged(ValueError):
    """A file of a member is damaged, so that the member cannot go on."""


def replace(path: Path, data: bytes, keep: Path | None = None) -> None:
    """Writes `data` to `path` atomically. With `keep` the file that was there before keeps existing under that name."""
    fresh = path.with_name(path.name + ".writing")
    try:
        with open(fresh, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            _rename_copy(path, keep)
        os.replace(fresh, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        kept = f" The previous version is still in {path}." if path.exists() else ""
        raise OSError(
            f"{path} could not be written ({len(data) / 2**20:.1f} MB): {error.strerror or error}.{kept} Free some space, "
            "or choose another folder."
        ) from error


def _rename_copy(path: Path, copy: Path) -> None:
    """Gives a file a second name, in place of the file of that name. Without hard links the first name is free for a moment."""
    second = copy.with_name(copy.name + ".writing")
    second.unlink(missing_ok=True)
    try:
        os.link(path, second)
    except OSError:
        os.replace(path, copy)
    else:
        os.replace(second, copy)


def replace_json(path: Path, value: Any) -> None:
    """Writes a value as JSON to `path` atomically."""
    replace(path, json.dumps(_plain(value), allow_nan=False, separators=(",", ":")).encode())


def _sync_folder(folder: Path) -> None:
    """Syncs a folder: a rename is only on the disk when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path, command: str = "train") -> None:
    """Creates the folder and checks that files can be written to it."""
    trial = folder / ".trial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.write_bytes(b"")
        trial.unlink()
    except OSError as error:
        raise OSError(
            f"{command}: cannot write to {folder}: {error.strerror}. Choose another --output-dir, or change its permissions."
        ) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks the folder of a run against a second process. The system releases the lock when the process ends."""
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RuntimeError(
                f"train: another process is training in {folder}. Wait until it ends, or choose another --output-dir."
            ) from error
        yield


class Journal:
    """A file of JSON lines that is truncated to `length` and then only grows."""

    def __init__(self, path: Path, length: int = 0) -> None:
        self.path = path
        self._file: BinaryIO = open(path, "ab")  # noqa: SIM115 - open for the whole run
        there = self._file.tell()
        if there < length:
            self._file.close()
            raise Damaged(
                f"{path} has {there} bytes, but {length} when the checkpoint was written: the file was truncated. Restore it, "
                "or remove the folder of the member to train it again."
            )
        self._file.truncate(length)
        self._file.seek(0, os.SEEK_END)

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record."""
        try:
            self._file.write(json.dumps(_plain(record), allow_nan=False).encode() + b"\n")
            self._file.flush()  # so that others can read it during training
        except OSError as error:
            raise self._failed(error) from error

    def synced(self) -> int:
        """Syncs the file to the disk and returns its length."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        return self._file.tell()

    def _failed(self, error: OSError) -> OSError:
        return OSError(f"{self.path} could not be written: {error.strerror}. Free some space, then continue with --resume.")

    def close(self) -> None:
        """Closes the file. Errors are ignored: `write` and `synced` have raised them before."""
        with contextlib.suppress(OSError):
            self._file.close()


class NoJournal:
    """Writes nothing: of several ranks only the first has journals."""

    def write(self, record: dict[str, Any]) -> None:
        pass

    def synced(self) -> int:
        return 0

    def close(self) -> None:
        pass


def read_text(path: Path) -> str:
    """Returns the text of a file in UTF-8. Raises a ValueError that names the file if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: this is not text in UTF-8: {error}. Convert it.") from error
    except OSError as error:
        raise ValueError(f"{path}: the file cannot be read: {error.strerror or error}.") from error


def from_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises a ValueError also for lists in lists in lists."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its lists are nested too deeply") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a journal without an incomplete last line."""
    records = []
    if path.exists():
        for line in path.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError):  # also for text that is not UTF-8
                record = from_json(line)
                if isinstance(record, dict):
                    records.append(record)
    return records


def _plain(value: Any) -> Any:
    """Converts NaN and Inf to null, which JSON needs, and rounds floats to 7 digits, the precision of float32."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
