# SPDX-License-Identifier: Apache-2.0
"""What ranks compare before training: any other byte of code, another label, name or pixel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from byteback.train import data
from byteback.train.config import TrainConfig
from byteback.train.ranks import setup
from byteback.train.ranks.world import World
from small_runs import picture_folder


def test_code_is_known_by_the_bytes_and_names_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "loop.py"
    file.write_text("a = 1\n")
    monkeypatch.setattr(setup.byteback, "__file__", str(tmp_path / "__init__.py"))
    first = setup._code()
    assert setup._code() == first
    file.write_text("a = 2\n")
    assert setup._code() != first
    file.write_text("a = 1\n")
    assert setup._code() == first
    file.rename(tmp_path / "other.py")
    assert setup._code() != first


def test_images_on_disk_are_known_by_names_and_labels_and_not_by_their_folder(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    for name in ("a", "b"):
        picture_folder(tmp_path / name)
    here, there = (data.load(f"folder:{tmp_path / name}", image_size=8) for name in ("a", "b"))
    assert setup._fingerprint(here.train) == setup._fingerprint(there.train) != setup._fingerprint(here.test)
    moved = tmp_path / "b" / "train" / "cat" / "1.png"
    moved.rename(tmp_path / "b" / "train" / "dog" / "1.png")
    other = data.load(f"folder:{tmp_path / 'b'}", image_size=8)
    assert len(other.train) == len(here.train) and setup._fingerprint(other.train) != setup._fingerprint(here.train)


def test_images_in_memory_are_known_by_their_pixels_and_labels() -> None:
    whole, same, pixel, label = (data.load("digits") for _ in range(4))
    pixel.train.images[3, 4, 5] += 1  # type: ignore[attr-defined]
    label.train.labels[7] += 1  # type: ignore[attr-defined]
    assert setup._fingerprint(whole.train) == setup._fingerprint(same.train)
    part = data.Part(whole.train, 100)
    assert setup._fingerprint(part) == setup._fingerprint(whole.train), "the number of images is compared beside it"
    for other in (pixel, label):
        assert setup._fingerprint(other.train) != setup._fingerprint(whole.train)


class _Two(World):
    """Rank 0 of two; `other` is what rank 1 has in another way."""

    size = 2

    def __init__(self, **other: Any) -> None:
        self.other = other

    def gather(self, value: Any) -> list[Any]:
        return [value, {**value, **self.other}]


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("PyTorch", "1.0"),
        ("--histogram-every", 0),
        ("--test-only", True),
        ("--epochs", 99),
        ("--recipe", ("float32",)),
        ("--seed", (7,)),
    ],
)
def test_whatever_ranks_must_agree_on_is_compared(what: str, value: object) -> None:
    config, images = TrainConfig(), data.load("digits")
    setup.check(_Two(), config.complete(), images)
    with pytest.raises(ValueError, match=f"rank 1 has another {what} than rank 0: "):
        setup.check(_Two(**{what: value}), config.complete(), images)
