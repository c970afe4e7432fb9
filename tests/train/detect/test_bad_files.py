# SPDX-License-Identifier: Apache-2.0
"""Broken files of a data set or of settings: the error names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from byteback.train import config_file
from byteback.train.detect import coco, voc


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[" * 100_000, b'{"images": ' + b"9" * 5000 + b"}", b"[1]"])
def test_a_broken_file_of_coco_is_named(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    for split in ("train", "val"):
        (tmp_path / "annotations" / f"instances_{split}.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"instances_train\.json"):
        coco.load(tmp_path)


def test_a_broken_list_of_voc_and_a_broken_config_are_named(tmp_path: Path) -> None:
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (tmp_path / part).mkdir(parents=True)
    for split in ("train", "val"):
        (tmp_path / "ImageSets" / "Main" / f"{split}.txt").write_bytes(b"\xe9t\xe9\n")
    with pytest.raises(ValueError, match=r"train\.txt: this is not text in UTF-8"):
        voc.load(tmp_path)
    file = tmp_path / "run.toml"
    for text in (b"a = \xff", b"epochs = " + b"9" * 5000, b"recipe = 7", b"x = " + b"[" * 50_000):
        file.write_bytes(text)
        with pytest.raises(ValueError, match=r"run\.toml: "):
            config_file.read(file)
