# SPDX-License-Identifier: Apache-2.0
"""Reads every image of a data set once before training, so that a damaged file does not end a run hours later.

What was found is kept in a cache of the user ($XDG_CACHE_HOME or ~/.cache), by the path, size and time of change of each
file. So only the first run on a data set takes time for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from byteback.train import interrupt
from byteback.train.checkpoints import files
from byteback.train.data import pictures

_NAMED = 50  # how many files an error lists; the cache has all of them
_CHUNK = 64
_SILENT = 10.0  # seconds after which the scan says how far it is


class _Problems(Dataset[Any]):
    """What is wrong with each file, or ""."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(map(str, paths))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        return pictures.problem(self.paths[index])


def problems(name: str, paths: Sequence[Path], workers: int) -> dict[Path, str]:
    """Returns the files that cannot be read, and why."""
    cache = _cache(name)
    known = _known(cache)
    stamps = {path: _stamp(path) for path in dict.fromkeys(paths)}
    asked = [path for path, stamp in stamps.items() if known.get(str(path), [None])[0] != stamp]
    if asked:
        known |= {str(path): [stamps[path], why] for path, why in zip(asked, _scanned(name, asked, workers), strict=True)}
        current = {str(path) for path in stamps}
        _write(cache, {path: entry for path, entry in known.items() if path in current})
    found = {path: known[str(path)][1] for path in stamps}
    return {path: why for path, why in found.items() if why}


def usable(name: str, paths: Sequence[Path], workers: int, skip: bool, say: Callable[[str], None] | None = None) -> list[bool]:
    """Returns which files can be read. Raises an error that names the others, unless they are to be skipped."""
    bad = problems(name, paths, workers)
    if bad and not skip:
        listed = "\n".join(f"  {why}" for why in list(bad.values())[:_NAMED])
        more = f"\n  and {len(bad) - _NAMED} more, all of them in {_cache(name)}" if len(bad) > _NAMED else ""
        raise ValueError(
            f"{name}: {len(bad)} of {len(paths)} images cannot be read:\n{listed}{more}\n"
            "Repair or remove them, or leave them out with --skip-bad-images."
        )
    if bad:
        (say or _say)("\n".join(f"{name}: left out: {why}" for why in bad.values()))
    return [path not in bad for path in paths]


def _scanned(name: str, paths: list[Path], workers: int) -> list[str]:
    workers = min(workers, len(paths) // _CHUNK)
    loader: DataLoader[Any] = DataLoader(
        _Problems(paths),
        batch_size=_CHUNK,
        num_workers=workers,
        collate_fn=list,
        worker_init_fn=_begin,
        generator=torch.Generator(),
    )
    with interrupt.held_back() if workers else contextlib.nullcontext():
        chunks = iter(loader)
    found: list[str] = []
    started = said = time.monotonic()
    for chunk in chunks:
        found += chunk
        if time.monotonic() - said > _SILENT:
            said = time.monotonic()
            left = (said - started) / len(found) * (len(paths) - len(found))
            _say(f"{name}: {len(found):,} of {len(paths):,} images were checked, {left:.0f} s left (the first time only)")
    return found


def _begin(_: int) -> None:
    interrupt.leave_to_the_parent()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _stamp(path: Path) -> list[int] | None:
    try:
        status = path.stat()
    except OSError:
        return None  # never equal to what is known, so the reader says what is wrong
    return [status.st_size, status.st_mtime_ns]


def _cache(name: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kind, _, where = name.partition(":")
    key = hashlib.sha256(f"{kind}:{Path(where).resolve()}".encode()).hexdigest()[:16]
    return root / "byteback" / f"images-{key}.json"


def _known(cache: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        known = files.from_json(cache.read_bytes())
        if isinstance(known, dict) and all(isinstance(entry, list) and len(entry) == 2 for entry in known.values()):
            return known
    return {}


def _write(cache: Path, known: dict[str, Any]) -> None:
    """Writes the cache, if that is possible: a home folder may be read-only."""
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        files.replace(cache, json.dumps(known).encode())
