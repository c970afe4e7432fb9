# SPDX-License-Identifier: Apache-2.0
"""What several ranks must have in common before they train: the code, the settings, the data, and the folder of the run."""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from pathlib import Path
from typing import Any

import torch

import byteback
from byteback.train import config_file
from byteback.train.config import TrainConfig
from byteback.train.data import Data, Source
from byteback.train.ranks.world import World, shared

_TOKEN = ".shared"
_PATIENCE = 10.0  # seconds until a file of another machine shows in a network folder


def check(world: World, config: TrainConfig, images: Data) -> None:
    """Raises an error on all ranks, if they differ."""
    if world.size == 1:
        return
    facts = {
        **{"code of byteback": _code(), "PyTorch": torch.__version__},
        **{f"--{name.replace('_', '-')}": value for name, value in config_file.settings(config).items()},
        # These change no number, but when the ranks talk to each other.
        **{"--histogram-every": config.histogram_every, "--test-only": config.test_only},
        **{"--recipe": config.recipe, "definition of a recipe": str(config.recipes), "--seed": config.seed},
        "state of --resume": config.resume is not None,
        "training images": f"{len(images.train)} ({_fingerprint(images.train)})",
        "test images": f"{len(images.test)} ({_fingerprint(images.test)})",
    }
    every = world.gather(facts)
    for rank, other in enumerate(every):
        for what, value in every[0].items():
            if other.get(what) != value:
                text = (
                    f"train: rank {rank} has another {what} than rank 0: {other.get(what)} instead of {value}. All ranks must "
                    "train the same network on the same data with the same version; start them with one command."
                )
                raise shared(ValueError(text))


def check_folder(world: World, folder: Path) -> None:
    """Raises an error on all ranks, if one does not see the files that rank 0 writes."""
    if world.size == 1:
        return

    def write() -> str:
        token = os.urandom(8).hex()
        (folder / _TOKEN).write_text(token)
        return token

    token = world.from_first(write)
    sees = world.gather(_sees(folder / _TOKEN, token))
    if world.is_first:
        (folder / _TOKEN).unlink(missing_ok=True)
    blind = [rank for rank, found in enumerate(sees) if not found]
    if blind:
        text = (
            f"train: rank {', '.join(map(str, blind))} does not see the files that rank 0 writes into {folder.absolute()}. "
            "Choose an --output-dir in a folder that all machines share."
        )
        raise shared(ValueError(text))


def _sees(path: Path, token: str) -> bool:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            if path.read_text() == token:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _code() -> str:
    """Returns version and checksum of the code: two checkouts may have the same version."""
    digest = hashlib.sha256()
    root = Path(byteback.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return f"{byteback.__version__}, checksum {digest.hexdigest()[:12]}"


def _fingerprint(source: Source) -> str:
    """Returns a checksum of the names and labels of a split, or of its pixels if they are in memory."""
    whole: Any = getattr(source, "whole", source)  # of a part
    dataset = getattr(whole, "dataset", whole)
    held = [getattr(dataset, name) for name in ("samples", "clips", "pictures") if hasattr(dataset, name)]
    if held:
        return f"{zlib.crc32(repr([_named(item) for item in held[0]]).encode()):08x}"
    code = 0
    for name in ("images", "canvas", "labels"):
        if hasattr(dataset, name):
            code = zlib.crc32(getattr(dataset, name).contiguous().numpy(), code)
    return f"{code:08x}"


def _named(item: Any) -> str:
    """Returns an item of a data set without the folder that it lies in, which may differ between machines."""
    if isinstance(item, tuple):
        return f"{Path(item[0]).name} {item[1:]}"
    about = {name: value for name, value in vars(item).items() if name != "path"}
    return f"{Path(item.path).name} {about}"
