# SPDX-License-Identifier: Apache-2.0
"""Images that cannot be read, and workers that die: named, and nothing is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from byteback.train import data
from byteback.train.data import pictures, scan
from byteback.train.data.from_disk import FromDisk
from small_runs import picture_folder


class _Endless(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, pid: Path) -> None:
        self.pid = pid

    def __len__(self) -> int:
        return 100

    def __getitem__(self, key: tuple[int, int, int]) -> int:
        if not self.pid.exists():
            self.pid.write_text(str(os.getpid()))
        return key[2]


def test_a_worker_that_was_killed_is_an_error_that_says_so(tmp_path: Path) -> None:
    source = FromDisk(_Endless(tmp_path / "pid"), 1, list)
    batches = source.batches(list(torch.arange(100).split(2)), 0, 0)
    next(batches)
    worker = int((tmp_path / "pid").read_text())
    os.kill(worker, signal.SIGTERM)  # is ignored
    next(batches)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(data.DataError, match="has died"):
        list(batches)


def test_16_bits_per_channel_are_not_white(tmp_path: Path) -> None:
    from PIL import Image

    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "x.png")
    read = np.asarray(pictures.read(tmp_path / "x.png"))
    assert read.shape == (8, 8, 3) and np.array_equal(read[:, :, 0], values >> 8)
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "x.tiff")
    assert "floating-point" in pictures.problem(tmp_path / "x.tiff")


def test_a_scan_names_every_bad_image_and_may_leave_them_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = picture_folder(tmp_path / "pictures")
    cut, empty, huge, pipe = (folder / "train" / "dog" / name for name in ("0.png", "4.png", "8.png", "12.png"))
    cut.write_bytes(cut.read_bytes()[:200])
    empty.write_bytes(b"")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)  # Pillow refuses twice as many
    Image.new("RGB", (30, 30)).save(huge)
    pipe.unlink()
    os.mkfifo(pipe)  # reading it would wait for ever
    with pytest.raises(ValueError, match=r"4 of 48 images cannot be read") as error:
        data.load(f"folder:{folder}", image_size=8)
    for path in (cut, empty, huge, pipe):
        assert str(path) in str(error.value)
    assert "--skip-bad-images" in str(error.value)
    asked: list[int] = []
    monkeypatch.setattr(scan, "_scanned", lambda _, paths, __: asked.append(len(paths)) or [""] * len(paths))
    assert len(data.load(f"folder:{folder}", image_size=8, skip_bad_images=True).train) == 36 - 4
    assert asked == [], "what the first scan found was kept"
    Image.new("RGB", (4, 4)).save(empty)
    assert len(data.load(f"folder:{folder}", image_size=8, skip_bad_images=True).train) == 36 - 3 and asked == [1]


def test_an_image_that_is_damaged_during_training_loses_nothing(tmp_path: Path) -> None:
    folder = picture_folder(tmp_path / "pictures", 16)
    images = data.load(f"folder:{folder}", image_size=8)
    (folder / "train" / "dog" / "0.png").write_bytes(b"")
    with pytest.raises(data.DataError, match=r"0\.png cannot be read.* Restore it, then continue with --resume"):
        list(images.train.batches([torch.arange(12)], 0, 0))
