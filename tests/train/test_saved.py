# SPDX-License-Identifier: Apache-2.0
"""A trained run: loaded, used for predictions, fine-tuned, exported and compared, all with the same result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import byteback
from byteback.train import compact, config_file, export, loop, predict, side_by_side, tasks
from byteback.train import data as data_sets
from byteback.train.checkpoints import files
from byteback.train.config import TrainConfig
from byteback.train.interrupt import Stopped
from byteback.train.variants import parse
from stops_after import StopsAfter

SMALL = ("--epochs", "1", "--no-tensorboard", "--histogram-every", "0", "--threads", "1", "--batch-size", "128")
SILENT = Console(quiet=True)


def train(*args: str) -> None:
    assert side_by_side.run(config_file.from_command_line([*SMALL, *args]), SILENT) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    train("--recipe", "float32", "unified-int8", "--ema", "0.5", "--output-dir", str(folder))
    return folder


def accuracy(member: Path) -> float:
    return float(files.read_lines(member / "metrics.jsonl")[-1]["test_accuracy"])


def test_a_loaded_network_predicts_what_training_tested(run: Path) -> None:
    test = data_sets.load("digits").test
    images, labels = next(iter(test.batches([torch.arange(len(test))], 0, 0)))
    member = run / "unified-int8" / "seed0"
    outputs = []
    for path in (member, member / "best.safetensors", member / "best.pt"):
        model = byteback.load(path)
        with torch.no_grad():
            outputs.append(model(images))
        assert model.byteback.classes == tuple("0123456789") and not model.training
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert float((outputs[0].argmax(1) == labels).float().mean()) == pytest.approx(accuracy(member), abs=1e-6)
    with torch.no_grad():
        plain = byteback.load(member, precision="float")(images)
    assert not any(isinstance(module, byteback.Int8Conv2d) for module in byteback.load(member, "float").modules())
    assert 0.0 < float((plain - outputs[0]).abs().max()) < 2.0


def facts(run: Path) -> dict[str, Any]:
    """What best.safetensors says about its network, without the versions."""
    found = compact.facts(run / "unified-int8" / "seed0" / "best.safetensors")
    return {key: value for key, value in found.items() if key not in ("format", "numerics_version")}


def test_what_cannot_be_loaded_is_said_in_a_sentence(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the run has several members \(float32/seed0, unified-int8/seed0\)"):
        byteback.load(run)
    with pytest.raises(ValueError, match="there is no file"):
        byteback.load(tmp_path / "best.safetensors")
    with pytest.raises(ValueError, match="precision is 'int4'"):
        byteback.load(run / "float32", precision="int4")
    contents = torch.load(run / "unified-int8" / "seed0" / "best.pt", weights_only=True)
    newer, other = tmp_path / "newer.pt", tmp_path / "other.pt"
    torch.save({**contents, "format": 2}, newer)
    with pytest.raises(
        ValueError, match=r"newer\.pt: the checkpoint has format 2, but this build reads 1\. Install a newer byteback"
    ):
        byteback.load(newer)
    torch.save({**contents, "config": contents["config"].replace('"resnet8"', '"resnet20"')}, other)
    with pytest.raises(
        ValueError, match=r"the weights do not fit the network that its config describes: .* is missing"
    ) as caught:
        byteback.load(other)
    assert "\n" not in str(caught.value)
    compact.save(tmp_path / "numerics.safetensors", byteback.load(run / "unified-int8"), {"numerics_version": 99, **facts(run)})
    with pytest.warns(UserWarning, match=r"numerics\.safetensors: the file has numerics version 99, but this build has"):
        byteback.load(tmp_path / "numerics.safetensors")
    for output, message in ((tmp_path, "is a folder"), (tmp_path / "absent" / "x.onnx", "there is no folder .*absent")):
        with pytest.raises(ValueError, match=f"export: --output .*{message}"):
            export.run(export.ExportConfig(str(run / "unified-int8"), output=str(output)), SILENT)
    with pytest.raises(ValueError, match=r"--size is for detectors, but .* is a network of the task classify"):
        export.run(export.ExportConfig(str(run / "unified-int8"), size=(8, 8)), SILENT)


def test_a_run_that_cannot_begin_leaves_no_folder(run: Path, tmp_path: Path) -> None:
    weights = ("--weights", str(run / "unified-int8" / "seed0"), "--model", "resnet20")
    with pytest.raises(ValueError, match=r"does not fit SmallResNet: .* is missing.*Choose the --model") as caught:
        train(*weights, "--recipe", "unified-int8", "--output-dir", str(tmp_path / "none"))
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"unknown layer for --freeze 'layer9"):
        train("--freeze", "layer9*", "--recipe", "float32", "--output-dir", str(tmp_path / "none"))
    assert not list(tmp_path.iterdir())


def test_sizes_of_the_files_are_those_of_the_documentation(run: Path) -> None:
    """docs/11-deploying.md: weights only, so no momentum, no average and, in int8, a quarter of each weight."""
    for variant, least in (("float32", 2.0), ("unified-int8", 4.0)):
        member = run / variant / "seed0"
        assert (member / "best.pt").stat().st_size > least * (member / "best.safetensors").stat().st_size, variant


def test_the_average_and_bfloat16_resume_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(ema=0.9, amp=True, epochs=2, batch_size=256, tensorboard=False, histogram_every=0).complete()
    data, kinds = tasks.load(config), []
    cross_entropy = loop.F.cross_entropy

    def watched(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kinds.append((logits.requires_grad, logits.dtype))
        return cross_entropy(logits, *args, **kwargs)

    monkeypatch.setattr(loop.F, "cross_entropy", watched)
    for variant in ("float32", "unified-int8"):
        ends = []
        for name, pauses in (("whole", ()), ("parts", (1, 3, 4))):
            member = loop.Member(parse(variant), 0, tmp_path / variant / name)
            for steps in pauses:
                stop = StopsAfter(steps)
                with pytest.raises(Stopped):
                    loop.train(config, member, data, stop, stop)
            never = StopsAfter(-1)
            loop.train(config, member, data, never, never)
            ends.append(files.read_lines(member.folder / "metrics.jsonl")[-1]["state_sha256"])
        assert ends[0] == ends[1], variant
        contents = torch.load(tmp_path / variant / "parts" / "best.pt", weights_only=True)
        averaged, own = contents["average"]["module.fc.weight"], contents["model"]["fc.weight"]
        assert not torch.equal(averaged, own), "the average is behind the weights"
        for file in ("best.pt", "best.safetensors"):
            assert torch.equal(byteback.load(tmp_path / variant / "parts" / file).state_dict()["fc.weight"], averaged)
    assert {dtype for trains, dtype in kinds if trains} == {torch.bfloat16}, "--amp: the head is computed in bfloat16"
    assert {dtype for trains, dtype in kinds if not trains} == {torch.float32}, "tests are in float32"


def test_predictions_are_those_of_the_network(run: Path, tmp_path: Path) -> None:
    member = run / "unified-int8" / "seed0"
    test = data_sets.load("digits").test
    paths = []
    for number in range(3):
        pixels = (test.images[number, :, :, 0].numpy() * 255.0 / 16.0).round().astype(np.uint8)  # type: ignore[attr-defined]
        paths.append(str(tmp_path / f"{number}.png"))
        Image.fromarray(pixels).save(paths[-1])
    model = byteback.load(member)
    images = next(iter(test.batches([torch.arange(3)], 0, 0)))[0]
    assert torch.equal(model.byteback.preprocess.batch(paths), images), "a file is preprocessed as a test image"
    predict.run(predict.PredictConfig(str(member), tuple(paths), str(tmp_path / "out")), SILENT)
    saved = json.loads((tmp_path / "out" / predict.NAME).read_text())["predictions"]
    with torch.no_grad():
        best = [model.byteback.classes[number] for number in model(images).argmax(1).tolist()]
    assert [row["classes"][0]["class"] for row in saved] == best and len(saved[0]["classes"]) == 3
    with pytest.raises(ValueError, match=r"absent\.png: no such image"):
        predict.run(predict.PredictConfig(str(member), ("absent.png",), str(tmp_path / "none")), SILENT)
    assert not (tmp_path / "none").exists()


def test_fine_tuning_starts_from_the_weights_of_a_run(run: Path, tmp_path: Path) -> None:
    member = tmp_path / "tuned" / "unified-int8" / "seed0"
    start = byteback.load(run / "float32", precision="float").state_dict()
    flags = (
        "--recipe",
        "unified-int8",
        "--weights",
        str(run / "float32"),
        "--freeze",
        "layer1*",
        "bn1",
        "--optimizer",
        "adamw",
    )
    train(*flags, "--lr", "0.0005", "--output-dir", str(tmp_path / "tuned"))
    assert accuracy(member) >= accuracy(run / "float32" / "seed0") - 0.01
    state = byteback.load(member / "best.pt").state_dict()
    frozen = [key for key in start if key.startswith(("layer1", "bn1")) and not key.endswith("num_batches_tracked")]
    assert len(frozen) == 14 and all(torch.equal(state[key], start[key]) for key in frozen)
    assert not torch.equal(state["fc.weight"], start["fc.weight"])


def test_a_run_is_exported_and_compared_with_its_test_images(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    member, path = run / "unified-int8" / "seed0", tmp_path / "model.onnx"
    said = Console(record=True, width=200, quiet=False, file=(tmp_path / "said").open("w"))
    assert export.run(export.ExportConfig(str(member), output=str(path), check=True, exact=True, threads=1), said)
    text = said.export_text()
    assert "100.0000% of" in text and "0 differ by one" in text and "onnxruntime float" in text
    assert path.stat().st_size < 150_000
    with pytest.raises(ValueError, match=r"was trained in float32 and has no clips"):
        export.run(export.ExportConfig(str(run / "float32"), output=str(path)), SILENT)


def test_a_flat_folder_is_split_with_a_seed_and_a_path_is_recognized(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(10):
            Image.fromarray(np.full((12, 12, 3), 20 * number, np.uint8)).save(tmp_path / name / f"{number}.png")
    made = data_sets.load(f"folder:{tmp_path}", image_size=8, augment=False)
    assert len(made.train) == 16 and len(made.test) == 4 and made.names == ("cat", "dog")
    assert "4 of its 20 images" in made.note and "seed 0" in made.note
    images, labels = next(iter(made.test.batches([torch.arange(4)], 0, 0)))
    assert labels.tolist() == [0, 0, 1, 1]
    again = data_sets.load(f"folder:{tmp_path}", image_size=8, augment=False)
    assert torch.equal(next(iter(again.test.batches([torch.arange(4)], 0, 0)))[0], images)
    assert made.preprocess is not None
    every = {tuple(made.preprocess(file).flatten().tolist()) for file in (tmp_path / "dog").iterdir()}
    assert tuple(images[3].flatten().tolist()) in every and len(every) == 10, "a file is preprocessed as a test image"
    with pytest.raises(ValueError, match=f"use --data folder:{tmp_path}"):
        data_sets.load(str(tmp_path))
