# SPDX-License-Identifier: Apache-2.0
"""cifar10, cifar100 and fashion-mnist, loaded by torchvision, with every file checked before it is read.

torchvision only says "not found or corrupted"; here the error names the file. A missing data set is downloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from byteback.torchvision_compat import load
from byteback.train.data.preprocess import Preprocess
from byteback.train.data.source import Data, InMemory

_TIMEOUT = 10.0  # seconds without data before a download fails


def _statistics(name: str) -> tuple[list[float], list[float]]:
    """Returns mean and standard deviation per channel of the training images, on the scale 0 to 255."""
    mean, std = {
        "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
        "cifar100": ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
        "fashion-mnist": ([0.2860], [0.3530]),
    }[name]
    return [255.0 * value for value in mean], [255.0 * value for value in std]


_CLASSES = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "fashion-mnist": "FashionMNIST"}


def downloaded(name: str, root: Path, augment: bool, download: bool) -> Data:
    """Loads one of the three data sets from the folder `root`."""
    kind = getattr(load().datasets, _CLASSES[name])
    folder, files = _files(name, kind, root)
    if not any(file.exists() for file in files):
        if not download:
            raise _absent(name, kind, folder, files, "and --no-download was given")
        _download(name, kind, root, folder, files)
    for file, check in files.items():
        _check(name, file, check)
    parts = [kind(root, train=train) for train in (True, False)]
    mean, std = _statistics(name)
    images = [_pixels(name, part.data) for part in parts]
    labels = [torch.as_tensor(part.targets, dtype=torch.int64) for part in parts]
    train = InMemory(images[0], labels[0], mean, std, crop=4 if augment else 0, flip=augment)
    channels = images[0].shape[3]
    test, border = InMemory(images[1], labels[1], mean, std), 2 if name == "fashion-mnist" else 0
    preprocess = Preprocess("pixels", 32, channels, tuple(mean), tuple(std), border)
    return Data(name, len(parts[0].classes), 32, channels, train, test, names=tuple(parts[0].classes), preprocess=preprocess)


def found(name: str, root: Path) -> bool:
    """Whether all files of a data set are in `root`. Their contents are not checked."""
    return all(file.is_file() for file in _files(name, getattr(load().datasets, _CLASSES[name]), root)[1])


def _files(name: str, kind: Any, root: Path) -> tuple[Path, dict[Path, Callable[[bytes], str]]]:
    """Returns the folder of a data set, and for each file a function from its bytes to what is wrong with them, or ""."""
    if name == "fashion-mnist":
        folder = root / "FashionMNIST" / "raw"
        return folder, {folder / archive.removesuffix(".gz"): _idx_problem for archive, _ in kind.resources}
    folder = root / kind.base_folder
    sums = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    return folder, {folder / file: _md5_problem(md5) for file, md5 in sums}


def _md5_problem(expected: str) -> Callable[[bytes], str]:
    def problem(data: bytes) -> str:
        found = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return "" if found == expected else f"its MD5 is {found} instead of {expected}"

    return problem


def _idx_problem(data: bytes) -> str:
    """Checks the header of an IDX file, which says how long the file is."""
    if len(data) < 8 or data[:3] != b"\0\0\x08" or not 1 <= data[3] <= 3:
        return "it does not start with the header of an IDX file of bytes"
    axes = data[3]
    sizes = [int.from_bytes(data[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(axes)]
    expected = 4 + 4 * axes + math.prod(sizes)
    return "" if len(data) == expected else f"it has {len(data)} bytes, but its header says {expected}"


def _check(name: str, file: Path, problem: Callable[[bytes], str]) -> None:
    try:
        data = file.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(
            f"{name}: {file} is missing, but other files of the data set exist. Add it, or remove the folder to download all "
            "files again."
        ) from error
    except OSError as error:
        raise ValueError(f"{name}: {file} cannot be read: {error.strerror}. Check its permissions.") from error
    wrong = problem(data)
    if wrong:
        raise ValueError(f"{name}: {file} is damaged or truncated: {wrong}. Remove it and download it again.")


def _download(name: str, kind: Any, root: Path, folder: Path, files: dict[Path, Any]) -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            kind(root, download=True)
    except Exception as error:  # urllib, sockets, tar and torchvision raise different errors
        raise _absent(name, kind, folder, files, f"and the download failed: {error}") from error
    finally:
        socket.setdefaulttimeout(before)


def _absent(name: str, kind: Any, folder: Path, files: dict[Path, Any], why: str) -> ValueError:
    source = kind.url if hasattr(kind, "url") else kind.mirrors[0]
    return ValueError(
        f"{name}: the data set is not in {folder.parent if name != 'fashion-mnist' else folder.parent.parent}, {why}.\n"
        f"  Put these files into {folder}: {', '.join(file.name for file in files)}\n"
        f"  They are available from {source}. If the data is in another folder: --data-path FOLDER, or set BYTEBACK_DATA."
    )


def _pixels(name: str, data: Any) -> torch.Tensor:
    """Returns (N, 32, 32, C) uint8. The 28x28 pixels of Fashion-MNIST are padded, for networks for 32x32."""
    images = torch.from_numpy(np.ascontiguousarray(data)) if isinstance(data, np.ndarray) else data
    if name == "fashion-mnist":
        images = torch.nn.functional.pad(images, (2, 2, 2, 2)).unsqueeze(3)
    return images
