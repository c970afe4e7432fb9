# SPDX-License-Identifier: Apache-2.0
"""Several ranks that do not have the same, or of which one meets an error: all end alike, and rank 0 says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from byteback.train import config_file
from byteback.train.checkpoints import checkpoint
from byteback.train.checkpoints.files import read_lines
from small_runs import picture_folder

pytest.importorskip("PIL")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
Seen = list[dict[str, Any]]


def together(name: str, folder: Path, ranks: int = 2) -> Seen:
    """What each rank saw."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, *launcher, str(Path(__file__).with_name("rank_days.py")), name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280 if name == "days" else 3000, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(2):
        picture_folder(folder / f"machine{rank}" / "pictures", 64)
        picture_folder(folder / f"machine{rank}" / "fewer", 64 - 8 * rank)
    (folder / "there").mkdir()
    (folder / "there" / "config.toml").write_text("")
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> Seen:
    return together("days", folder)


def said(seen: Seen, name: str) -> str:
    """The error of rank 0, in one line; the other rank must end with the same code and say nothing."""
    here, there = seen[0][name], seen[1][name]
    assert here["code"] == there["code"] == 1, (here, there)
    assert there["error"] == there["out"] == "", there
    assert here["error"].count("\n") == 1, here
    return str(here["error"])


def test_two_ranks_are_one_run_with_one_report(seen: Seen, folder: Path) -> None:
    here, there = seen[0]["whole_run"], seen[1]["whole_run"]
    assert here["code"] == there["code"] == 0, (here, there)
    assert here["saved"] == there["saved"] != [] and there["out"] == there["error"] == ""
    assert "batch size 60 x 2 processes = 120 images per step" in here["out"]
    assert here["out"].count("epoch 2/2") == 1 and here["out"].count("Its report page is") == 1
    member = folder / "whole" / "unified-int8" / "seed0"
    records = read_lines(member / "metrics.jsonl")
    steps = [record["step"] for record in records if record["kind"] == "step"]
    assert steps == list(range(1, 25)), "1437 images in 12 steps of 120, the last one of 117: 59 and 58"
    assert records[0]["batch_size"] == 120 and records[0]["ranks"] == 2
    epochs = [record for record in records if record["kind"] == "epoch"]
    for name, images in (("train_accuracy", 1437), ("test_accuracy", 360)):
        for epoch in epochs:  # each image is counted exactly once
            assert epoch[name] * images == pytest.approx(round(epoch[name] * images), abs=1e-3)
    assert epochs[-1]["test_accuracy"] > 0.8
    contents = checkpoint.load(member / "last.pt")
    assert contents["random"].shape[0] == 2 and not torch.equal(*contents["random"])
    assert config_file.read(folder / "whole" / "config.toml").processes == 2
    pictures = read_lines(member / "histograms.jsonl")
    assert {picture["shape"][0] for picture in pictures} == {120}, "of the images of both ranks"


def test_settings_that_differ_are_said_once(seen: Seen, folder: Path) -> None:
    assert "rank 1 has another --lr than rank 0: 0.2 instead of 0.1" in said(seen, "other_settings")
    assert not (folder / "run-settings").exists()


def test_different_code_is_said_once(seen: Seen, folder: Path) -> None:
    error = said(seen, "other_code")
    assert "rank 1 has another code of byteback than rank 0: 9.9, checksum beef instead of 9.9, checksum cafe" in error
    assert not (folder / "run-code").exists()


def test_a_recipe_that_differs_is_said_once(seen: Seen, folder: Path) -> None:
    error = said(seen, "other_recipe")
    assert "rank 1 has another --recipe than rank 0: ('unified-int8:period=20',) instead of ('unified-int8:period=10" in error
    assert not (folder / "run-recipe").exists()


def test_different_images_are_said_once(seen: Seen, folder: Path) -> None:
    error = said(seen, "other_images")
    assert "rank 1 has another training images than rank 0: 42 (" in error and "instead of 48 (" in error
    assert not (folder / "run-images").exists()


def test_a_folder_that_is_not_shared_is_said_once(seen: Seen, folder: Path) -> None:
    error = said(seen, "no_shared_folder")
    assert f"rank 1 does not see the files that rank 0 writes into {folder / 'machine0' / 'own'}" in error
    assert not (folder / "machine1" / "own").exists() and not (folder / "machine0" / "own" / "config.toml").exists()


def test_a_run_that_is_there_is_said_once(seen: Seen) -> None:
    assert "already contains a run" in said(seen, "a_run_is_there")


@pytest.mark.parametrize(
    ("name", "run", "steps"),
    [
        ("bad_image_of_rank_1", "run-train-True", 0),
        ("bad_image_of_rank_0", "run-train-False", 0),
        ("bad_image_in_the_test", "run-val-True", 3),
    ],
)
def test_an_unreadable_image_of_one_rank_ends_all_and_is_named(
    seen: Seen, folder: Path, name: str, run: str, steps: int
) -> None:
    error = said(seen, name)
    assert ".png" in error and "--resume" in error
    last = checkpoint.load(folder / run / "plain-int8" / "seed0" / "last.pt")
    assert last["progress"]["step"] == steps
    assert seen[0][name]["saved"] == seen[1][name]["saved"] != []


def test_after_an_unreadable_image_the_run_goes_on(seen: Seen, folder: Path) -> None:
    for rank in seen:
        assert rank["goes_on_after_a_bad_image"]["code"] == 0, rank
    records = read_lines(folder / "run-val-True" / "plain-int8" / "seed0" / "metrics.jsonl")
    assert [record["kind"] for record in records if record["kind"] != "layers"] == [
        "start",
        "step",
        "step",
        "step",
        "epoch",
        "end",
    ]


@pytest.mark.parametrize(("name", "run"), [("nan_loss", "nan-loss"), ("nan_gradient", "nan-gradient")])
def test_nan_on_one_rank_ends_the_member_on_all_and_the_next_is_trained(seen: Seen, folder: Path, name: str, run: str) -> None:
    here, there = seen[0][name], seen[1][name]
    assert here["code"] == there["code"] == 0, (here, there)
    assert here["saved"] == there["saved"] != []
    first, second = (
        read_lines(folder / run / recipe / "seed0" / "metrics.jsonl")[-1] for recipe in ("plain-int8", "unified-int8")
    )
    assert first["kind"] == "diverged" and "step 1 of epoch 0" in first["why"]
    assert second["kind"] == "end"


# ---- other tasks ----


def _boxes_and_clips(folder: Path, ranks: int, shapes: int, clips: int) -> None:
    """A folder for each rank, images with boxes, and clips of 5 frames."""
    from PIL import Image

    from drawn_shapes import draw

    for rank in range(ranks):
        (folder / f"machine{rank}").mkdir()
    draw(folder / "shapes", train=shapes, test=3)
    for number in range(5 * clips):
        clip, frame = divmod(number, 5)
        path = folder / "frames" / ("walk" if clip % 2 else "run") / f"clip{clip}" / f"{frame}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((24, 30, 3), (40 * frame + clip) % 256, dtype=np.uint8)).save(path)


@pytest.mark.slow
def test_detection_and_video_are_one_run_of_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    _boxes_and_clips(tmp_path, ranks=2, shapes=12, clips=16)
    here, there = together("tasks", tmp_path)
    for name, steps, score in (("detection", 3, "mAP"), ("video", 3, "test_accuracy")):
        assert here[name]["code"] == there[name]["code"] == 0, (here[name], there[name])
        assert here[name]["saved"] == there[name]["saved"] != [], name
        assert there[name]["out"] == "" and "Its report page is" in here[name]["out"]
        assert (tmp_path / name / "report.html").stat().st_size > 10_000
        records = read_lines(tmp_path / name / "unified-int8" / "seed0" / "metrics.jsonl")
        assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, steps + 1))
        epoch = next(record for record in records if record["kind"] == "epoch")
        assert 0.0 <= epoch[score] <= 1.0 and records[-1]["kind"] == "end"
    assert json.loads((tmp_path / "detection" / "unified-int8" / "seed0" / "detections.json").read_text())["epochs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("task", ["digits", "video", "detection"])
def test_a_hundred_steps_of_every_recipe_leave_the_same_bits_on_all_ranks(task: str, ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    _boxes_and_clips(tmp_path, ranks, shapes=160, clips=200)
    seen = together(f"recipes-{task}", tmp_path, ranks)
    assert len(seen) == ranks and len(seen[0]) == 4
    for recipe, first in seen[0].items():
        assert all(rank[recipe]["code"] == 0 for rank in seen), [rank[recipe] for rank in seen]
        assert all(rank[recipe]["saved"] == first["saved"] != [] for rank in seen), recipe
        records = read_lines(tmp_path / f"{task}-{recipe}" / recipe / "seed0" / "metrics.jsonl")
        assert records[0]["ranks"] == ranks and records[-1]["step"] == 100, (recipe, records[-1])
