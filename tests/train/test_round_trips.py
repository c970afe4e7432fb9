# SPDX-License-Identifier: Apache-2.0
"""Train → load → predict → export → onnxruntime: all agree on 1,000 images, for six networks, a video network and a detector.

Run it alone to see the numbers: pytest -m slow -s -n0 tests/train/test_round_trips.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import byteback
from byteback.export import Check, check, onnx_bytes
from byteback.train import config_file, predict, side_by_side
from byteback.train import data as data_sets
from byteback.train.checkpoints import files
from drawn_shapes import CLASSES, draw

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

COUNT, BATCH = 1000, 32  # BATCH is that of `byteback predict`: float sums depend on it
SILENT = Console(quiet=True)
BATCHES, SMALL, LARGE = ("--batch-size", "64"), ("--image-size", "8"), ("--image-size", "32")
NETWORKS = {
    "resnet8": (*SMALL, "--epochs", "6", "--lr", "0.05"),
    "resnet20": (*SMALL, "--epochs", "5", "--lr", "0.05"),
    "mobilenet_v2_x0_25": (*LARGE, "--epochs", "4", "--lr", "0.1"),
    "vgg16_bn": (*LARGE, "--epochs", "1", "--lr", "0.05"),
    "alexnet": (*LARGE, "--epochs", "2", "--optimizer", "adamw", "--lr", "0.0003"),
    "inception_v3": (*LARGE, "--epochs", "1", "--lr", "0.05"),
}
DIRECTIONS = {"down": (2, 0), "left": (0, -2), "right": (0, 2), "up": (-2, 0)}
FRAMES = 8


def trained(folder: Path, *args: str) -> Path:
    """Trains one member in int8, and returns its folder."""
    more = ("--recipe", "unified-int8", "--no-tensorboard", "--histogram-every", "0", "--workers", "0")
    config = config_file.from_command_line([*args, *more, "--output-dir", str(folder)])
    assert side_by_side.run(config, SILENT) == 0
    return folder / "unified-int8" / "seed0"


def score(member: Path) -> float:
    return max(line["test_accuracy"] for line in files.read_lines(member / "metrics.jsonl") if line["kind"] == "epoch")


def predicted(member: Path, paths: Sequence[Path], folder: Path, **options: Any) -> list[Any]:
    """What `byteback predict` saves."""
    predict.run(predict.PredictConfig(str(member), tuple(map(str, paths)), str(folder), **options), SILENT)
    rows: list[Any] = json.loads((folder / predict.NAME).read_text())["predictions"]
    return rows


def exported(model: torch.nn.Module, example: torch.Tensor, inputs: Sequence[torch.Tensor]) -> list[Check]:
    """Compares the exact file and the Q/DQ file with the model."""
    made = [check(model, onnx_bytes(model, example, exact=exact), inputs, exact=exact) for exact in (True, False)]
    for found in made:
        assert found.images == COUNT and not found.failures(), found.failures()
    assert made[0].layers.equal == 1.0 and made[0].layers.compared > 10_000
    return made


def say(name: str, reached: float, made: Sequence[Check]) -> None:
    exact, qdq = made
    parts = [
        f"{exact.layers.compared:,} integers, Q/DQ {qdq.layers.equal:.4%} equal, {qdq.layers.by_more} off by more than one"
    ]
    for found in made:
        same = found.boxes.share if found.boxes.compared else found.same_top1
        parts.append(f"{'exact' if found.exact else 'Q/DQ'} {same:.2%} of {found.boxes.compared or found.images} the same")
    sys.stdout.write(f"\n{name} (test {reached:.2%}): {'; '.join(parts)}\n")


def classes_agree(name: str, member: Path, paths: Sequence[Path], folder: Path) -> None:
    """A loaded network, its checkpoint, `byteback predict` and both files agree on all images."""
    model, checkpoint = byteback.load(member), byteback.load(member / "best.pt")
    about: Any = model.byteback
    inputs = [about.preprocess.batch(paths[start : start + BATCH]) for start in range(0, COUNT, BATCH)]
    with torch.no_grad():
        outputs = [model(x) for x in inputs]
        assert all(torch.equal(checkpoint(x), y) for x, y in zip(inputs, outputs, strict=True))
    best, scores = torch.cat(outputs).argmax(1).tolist(), torch.cat(outputs).softmax(1).amax(1).tolist()
    rows = predicted(member, paths, folder, top=1)
    assert [row["classes"][0]["class"] for row in rows] == [about.classes[number] for number in best]
    assert [row["classes"][0]["score"] for row in rows] == [round(value, 6) for value in scores]
    assert score(member) > 0.8, "a network that has learnt nothing has no class that it prefers"
    say(name, score(member), exported(model, about.example, inputs))


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """1,000 digits as files: those of the test, and others. `byteback predict` enlarges them for the larger networks."""
    made: Any = data_sets.load("digits")
    pixels = torch.cat([made.test.images, made.train.images])[:COUNT, :, :, 0].numpy() * (255.0 / 16.0)
    folder = tmp_path_factory.mktemp("digits")
    paths = [folder / f"{number}.png" for number in range(COUNT)]
    for path, image in zip(paths, pixels.round().astype(np.uint8), strict=True):
        Image.fromarray(image).save(path)
    return paths


@pytest.mark.parametrize("name", NETWORKS)
def test_the_classes_of_digits_agree(name: str, digits: list[Path], tmp_path: Path) -> None:
    member = trained(tmp_path / "run", "--model", name, *BATCHES, *NETWORKS[name])
    classes_agree(name, member, digits, tmp_path / "predictions")


def _clip(folder: Path, number: int, direction: tuple[int, int]) -> Path:
    """Writes the frames of a bright square that moves over noise and around the borders."""
    random = np.random.default_rng(number)
    folder.mkdir(parents=True)
    start = random.integers(0, 32, 2)
    for frame in range(FRAMES):
        pixels = random.integers(90, 140, (32, 32), dtype=np.uint8)
        rows, columns = ((start[axis] + frame * direction[axis] + np.arange(10)) % 32 for axis in range(2))
        pixels[np.ix_(rows, columns)] = 250
        Image.fromarray(pixels).save(folder / f"{frame}.png")
    return folder


def test_the_classes_of_clips_agree(tmp_path: Path) -> None:
    paths = []
    for number in range(COUNT + 320):
        label = tuple(DIRECTIONS)[number % 4]
        split = "val" if number < COUNT else "train"
        path = _clip(tmp_path / "clips" / split / label / f"{number}", number, DIRECTIONS[label])
        if split == "val":
            paths.append(path)
    flags = ("--task", "video", "--data", f"frames:{tmp_path / 'clips'}", "--model", "r3d_8", "--frames", str(FRAMES))
    member = trained(tmp_path / "run", *flags, *LARGE, "--batch-size", "16", "--epochs", "3", "--lr", "0.05", "--no-augment")
    classes_agree("r3d_8", member, paths, tmp_path / "predictions")


def test_the_boxes_of_a_detector_agree(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    root = draw(tmp_path / "shapes", train=160, test=COUNT)
    flags = ("--task", "detect", "--data", f"voc:{root}", "--model", "fasterrcnn_resnet50_fpn", "--backbone", "resnet18")
    sizes = ("--image-size", "80", "--anchor-size", "16", "--box-samples", "64", "--batch-size", "4")
    member = trained(tmp_path / "run", *flags, *sizes, "--epochs", "4", "--lr", "0.01", "--no-augment")
    model, checkpoint = byteback.load(member), byteback.load(member / "best.pt")
    about: Any = model.byteback
    paths = sorted((root / "JPEGImages").glob("*.png"))[-COUNT:]
    inputs = [about.preprocess(path) for path in paths]
    rows = predicted(member, paths, tmp_path / "predictions", least_score=0.0)
    with torch.no_grad():
        for row, image in zip(rows, inputs, strict=True):
            found, other = model([image])[0], checkpoint([image])[0]
            assert all(torch.equal(found[key], other[key]) for key in found)
            assert [box["class"] for box in row["boxes"]] == [CLASSES[label - 1] for label in found["labels"].tolist()]
            assert [box["score"] for box in row["boxes"]] == [round(value, 6) for value in found["scores"].tolist()]
    made = exported(model, inputs[0], inputs)
    assert made[0].boxes.compared > COUNT, "a detector that has learnt nothing finds no box"
    say("fasterrcnn_resnet50_fpn", score(member), made)
