# SPDX-License-Identifier: Apache-2.0
"""Damaged, incomplete and hostile files of a run: a clear error, no foreign code is run, and the other members go on."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

from byteback.train.checkpoints import checkpoint
from small_runs import SMALL, ends, train


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    train(*SMALL, "--epochs", "2", "--recipe", "plain-int8", "float32", "--output-dir", str(run))
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a run in which no member has ended."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for metrics in run.glob("*/seed0/metrics.jsonl"):
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    return run


def test_a_damaged_checkpoint_falls_back_to_the_one_before_it(finished: Path, run: Path) -> None:
    last, previous = (run / "plain-int8" / "seed0" / name for name in ("last.pt", "previous.pt"))
    whole = last.read_bytes()
    assert checkpoint.load(previous)["progress"]["step"] <= checkpoint.load(last)["progress"]["step"]
    earlier = checkpoint.load(previous)
    earlier["progress"].update(epoch=0, step=0)
    last.write_bytes(whole[:-500])
    code, out = train("--resume", str(run))
    assert code == 0 and "last.pt: the checkpoint is damaged" in out and "Going on from the checkpoint before it" in out
    assert ends(run) == ends(finished)


def test_a_member_without_a_readable_checkpoint_does_not_stop_the_others(finished: Path, run: Path) -> None:
    for name in ("last.pt", "previous.pt"):
        (run / "plain-int8" / "seed0" / name).write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"(?s)1 of 2 members in .* could not go on.*previous\.pt: the checkpoint is damaged"):
        train("--resume", str(run))
    assert ends(run)[0] == ends(finished)[0], "float32 was trained to its end"
    assert (run / "plain-int8" / "seed0" / "last.pt").read_bytes() == b"nothing"


@pytest.mark.parametrize("how", ["deleted", "cut", "no records"])
def test_a_damaged_journal_is_an_error_of_its_member(how: str, run: Path) -> None:
    metrics = run / "plain-int8" / "seed0" / "metrics.jsonl"
    metrics.write_bytes({"deleted": b"", "cut": metrics.read_bytes()[:200], "no records": b"[1]\n7\n\xff\n"}[how])
    if how == "deleted":
        metrics.unlink()
    with pytest.raises(ValueError, match=r"1 of 2 members.*\n.*metrics\.jsonl has .* the file was truncated"):
        train("--resume", str(run))


@pytest.mark.parametrize("how", ["deep", "no field"])
def test_records_that_nobody_wrote_are_no_traceback(how: str, finished: Path, run: Path) -> None:
    metrics, summary = run / "plain-int8" / "seed0" / "metrics.jsonl", run / "summary.json"
    summary.write_text("[" * 100_000)
    if how == "deep":
        metrics.write_text(metrics.read_text() + "[" * 100_000 + "\n")
        assert train("--resume", str(run))[0] == 0 and ends(run) == ends(finished)
    else:
        metrics.write_text(metrics.read_text().replace('"images_per_second"', '"images"'))
        with pytest.raises(ValueError, match=r"metrics\.jsonl has a record without a field .*images_per_second"):
            train("--resume", str(run))


class _Hostile:
    def __reduce__(self) -> object:
        return os.system, ("touch hostile-code-ran",)


def test_a_hostile_checkpoint_is_called_so_and_not_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.pt"
    torch.save({"progress": _Hostile()}, path)
    with pytest.raises(ValueError, match=r"contains the Python object posix\.system.*could run code") as error:
        checkpoint.load(path)
    assert "weights_only" not in str(error.value) and not Path("hostile-code-ran").exists()
    path.write_bytes(pickle.dumps({"progress": _Hostile()}))
    old = tmp_path / "old.pt"
    torch.save({"progress": _Hostile()}, old, _use_new_zipfile_serialization=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch would ask to file an issue
        for file in (path, old):
            with pytest.raises(ValueError, match=r"contains the Python object posix\.system.*could run code"):
                checkpoint.load(file)
    assert not Path("hostile-code-ran").exists()
    for damaged in (old.read_bytes()[:40], b"\x80\x04" + b"x" * 50, b"nothing"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.pt: the checkpoint is damaged or truncated"):
            checkpoint.load(path)


@pytest.mark.parametrize("name", ["config", "random", "lengths", "progress", "optimizer", "format"])
def test_a_checkpoint_without_a_field_is_not_complete(name: str, run: Path, tmp_path: Path) -> None:
    contents = checkpoint.load(run / "plain-int8" / "seed0" / "last.pt")
    for changed in ({key: value for key, value in contents.items() if key != name}, {**contents, name: 7.5}):
        torch.save(changed, tmp_path / "x.pt")
        with pytest.raises(ValueError, match=rf"x\.pt: .*{name}"):
            checkpoint.load(tmp_path / "x.pt")
    contents["progress"]["steps"] = 1
    torch.save(contents, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"x\.pt: its progress has other fields"):
        checkpoint.load(tmp_path / "x.pt")


def test_a_flipped_bit_in_the_weights_of_a_backbone_is_found(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    weight = torch.randn(64)
    torch.save({"conv.weight": weight}, path)
    whole = bytearray(path.read_bytes())
    whole[whole.index(weight.numpy().tobytes()) + 5] ^= 0x10
    path.write_bytes(whole)
    assert zipfile.is_zipfile(path)
    with pytest.raises(ValueError, match=r"weights\.pt: the checkpoint is damaged.*checksum"):
        checkpoint.read(path)
    old = tmp_path / "resnet18-0123abcd.pth"  # without checksums; PyTorch puts one into the name
    torch.save({"conv.weight": weight}, old, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"its name says 0123abcd"):
        checkpoint.read(old)
    torch.testing.assert_close(checkpoint.read(old.rename(tmp_path / "old.pth"))["conv.weight"], weight, rtol=0, atol=0)


def test_the_folder_of_a_member_that_vanishes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    save = checkpoint.save

    def vanished(path: Path, contents: dict[str, object]) -> None:
        shutil.rmtree(path.parent)
        save(path, contents)

    monkeypatch.setattr(checkpoint, "save", vanished)
    with pytest.raises(OSError, match=r"(best|last)\.pt could not be written .*No such file"):
        train(*SMALL, "--epochs", "1", "--recipe", "float32", "--output-dir", str(run))
