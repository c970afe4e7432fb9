# SPDX-License-Identifier: Apache-2.0
"""Files survive a failed write and a crash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from byteback.train.checkpoints import files


@pytest.mark.parametrize("broken", ["write", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.pt"
    files.replace(path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if broken == "write":
            patch.setattr("builtins.open", full)
        else:
            patch.setattr(os, broken, full)
        with pytest.raises(OSError, match=r"No space left on device.*The previous version is still in"):
            files.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["last.pt"]


def test_a_journal_is_cut_to_what_the_checkpoint_knew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = files.Journal(path)
    journal.write({"step": 1, "loss": float("nan")})
    length = journal.synced()
    journal.write({"step": 2})
    journal.close()
    again = files.Journal(path, length)
    assert again.synced() == length
    again.write({"step": 3})
    again.close()
    assert files.read_lines(path) == [{"step": 1, "loss": None}, {"step": 3}]
    with pytest.raises(ValueError, match="the file was truncated"):
        files.Journal(path, 10_000)


def test_a_folder_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write to .*file/run: Not a directory"):
        files.make_folder(tmp_path / "file" / "run")


def test_two_processes_cannot_share_a_run(tmp_path: Path) -> None:
    with files.locked(tmp_path), pytest.raises(RuntimeError, match="another process is training"), files.locked(tmp_path):
        pass
    with files.locked(tmp_path):
        pass
