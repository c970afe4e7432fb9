# SPDX-License-Identifier: Apache-2.0
"""`byteback train --task detect` from its data to its table, and the detectors that it builds."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

pytest.importorskip("pycocotools")
pytest.importorskip("PIL")
import byteback
from byteback import torchvision_compat
from byteback.nn import Int8Layer
from byteback.train import compact, predict, tasks
from byteback.train.checkpoints.files import read_lines
from byteback.train.config import TrainConfig
from byteback.train.detect import networks, run
from byteback.train.interrupt import Stopped
from byteback.train.loop import Member
from byteback.train.variants import parse
from drawn_shapes import annotation, draw
from stops_after import StopsAfter

torchvision = torchvision_compat.load()


def command(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "160"}
    call = [sys.executable, "-m", "byteback", *args]
    return subprocess.run(call, capture_output=True, text=True, timeout=300, cwd=cwd, env=env)


def test_a_tiny_run_ends_to_end(tmp_path: Path) -> None:
    root = draw(tmp_path / "shapes", train=4, test=2)
    flat = [("disc", 1, 1, 9, 9), ("square", 5, 5, 5, 20)]
    (root / "Annotations" / "image1.xml").write_text(annotation("image1.png", (96, 80), flat))
    common = ("--task", "detect", "--data", "voc:shapes", "--backbone", "resnet18", "--image-size", "64", "--batch-size", "2")
    more = ("--recipe", "unified-int8", "--epochs", "1", "--no-tensorboard", "--workers", "0", "--output-dir", "run")
    done = command("train", *common, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("byteback: warning: voc:shapes: dropped 1 boxes without area: "), done.stderr
    assert "mAP" in done.stdout and "64 pixels (shorter side) with disc, square" in done.stdout
    member = tmp_path / "run" / "unified-int8" / "seed0"
    records = read_lines(member / "metrics.jsonl")
    epoch = next(record for record in records if record["kind"] == "epoch")
    assert epoch["mAP"] == epoch["test_accuracy"] and set(epoch["per_class_AP"]) == {"disc", "square"}
    step = next(record for record in records if record["kind"] == "step")
    assert step["loss"] > 0 and step["accuracy"] is None and epoch["train_accuracy"] is None
    assert records[0]["saved_bytes"] > 0 and records[-1]["kind"] == "end"
    assert records[0]["backbone"] == "resnet18" and records[0]["class_names"] == ["disc", "square"]
    assert json.loads((member / "detections.json").read_bytes())["epochs"] == 1
    assert 'id="detections"' in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["score"] == "mAP" and summary["finished"] and {"mAP", "AP50", "AP75"} <= summary["rows"][0].keys()
    again = command("train", "--resume", "run", cwd=tmp_path)
    assert again.returncode == 0 and "already finished" in again.stdout, again.stderr
    tested = command("eval", str(member / "last.pt"), cwd=tmp_path)
    assert tested.returncode == 0 and f"mAP {epoch['mAP']:.2%}" in tested.stdout, tested.stderr
    _predicts(member, sorted(root.rglob("image0.png"))[0], tmp_path)


def _predicts(member: Path, image: Path, folder: Path) -> None:
    """A loaded detector finds what `byteback predict` says, draws and saves."""
    predict.run(predict.PredictConfig(str(member), (str(image),), str(folder / "found"), least_score=0.0), Console(quiet=True))
    model = byteback.load(member)
    with torch.no_grad():
        found = model([model.byteback.preprocess(image)])[0]
    saved = json.loads((folder / "found" / predict.NAME).read_text())["predictions"][0]
    assert len(saved["boxes"]) == len(found["boxes"]) and (folder / "found" / "image0-boxes.png").is_file()
    assert {box["class"] for box in saved["boxes"]} <= {"disc", "square"} == set(model.byteback.classes)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown detector 'yolo'"):
        networks.build("yolo", None, 3, 64)
    with pytest.raises(ValueError, match=r"unknown backbone 'resnet19'\. Did you mean resnet18"):
        networks.build("retinanet_resnet50_fpn", "resnet19", 3, 64)
    with pytest.raises(ValueError, match="--backbone resnet18 cannot be used"):
        networks.build("ssdlite320_mobilenet_v3_large", "resnet18", 3, 64)
    with pytest.raises(ValueError, match=r"--backbone, --anchor-size: for detectors only\. Add --task detect"):
        TrainConfig(backbone="resnet18", anchor_size=16)
    for name in ("fcos_resnet50_fpn", "ssdlite320_mobilenet_v3_large"):
        with pytest.raises(ValueError, match="--anchor-size cannot be used"):
            networks.build(name, None, 3, 64, anchor_size=16)
    with pytest.raises(ValueError, match="--box-samples cannot be used"):
        networks.build("retinanet_resnet50_fpn", "resnet18", 3, 64, box_samples=16)
    file = tmp_path / "weights.pt"
    torch.save(torchvision.models.resnet18(num_classes=2).state_dict(), file)
    with pytest.raises(ValueError, match="these are not the weights of resnet50"):
        networks.build("retinanet_resnet50_fpn", "resnet50", 3, 64, str(file))
    file.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="the checkpoint is damaged"):
        networks.build("retinanet_resnet50_fpn", "resnet18", 3, 64, str(file))


@pytest.mark.parametrize("name", ["retinanet_resnet50_fpn", "fasterrcnn_resnet50_fpn"])
def test_anchors_are_torchvisions_and_can_be_smaller(name: str) -> None:
    sizes = []
    for smallest in (None, 32, 16):
        model: Any = networks.build(name, "resnet18", 3, 64, anchor_size=smallest)
        sizes.append((model.anchor_generator if name.startswith("retina") else model.rpn.anchor_generator).sizes)
    assert sizes[0] == sizes[1] and sizes[2][1:] == sizes[0][:-1] and sizes[2][0][0] == 16


def test_the_second_stage_is_trained_on_as_many_boxes_as_asked() -> None:
    model: Any = networks.build("fasterrcnn_resnet50_fpn", "resnet18", 3, 64, box_samples=24)
    seen: list[int] = []
    model.roi_heads.box_head.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    target = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    model.train()([torch.rand(3, 64, 64)], [target])
    assert seen and 0 < seen[0] <= 24
    assert networks.build("fasterrcnn_resnet50_fpn", "resnet18", 3, 64).roi_heads.fg_bg_sampler.batch_size_per_image == 512


def test_a_backbone_checkpoint_is_taken_over_with_frozen_norms_that_fuse(tmp_path: Path) -> None:
    classifier = torchvision.models.resnet18(num_classes=2)
    file = tmp_path / "weights.pt"
    torch.save(classifier.state_dict(), file)
    config = TrainConfig(task="detect", model="fasterrcnn_resnet50_fpn", backbone="resnet18", data="voc:x", image_size=64)
    config = dataclasses.replace(config, backbone_checkpoint=str(file))
    model: Any = run.build(config, None, 3)
    assert torch.equal(model.backbone.body.layer4[1].conv2.weight, classifier.layer4[1].conv2.weight)
    compact.save(tmp_path / compact.NAME, byteback.prepare(classifier, "plain-int8"), {"classes": 2})
    other: Any = run.build(dataclasses.replace(config, backbone_checkpoint=str(tmp_path / compact.NAME)), None, 3)
    weight = classifier.layer4[1].conv2.weight.detach()
    step = float(weight.abs().max()) / 127  # int8 weights become floats again
    assert 0.0 < float((other.backbone.body.layer4[1].conv2.weight.detach() - weight).abs().max()) <= 0.51 * step
    assert not model.backbone.body.layer1[0].conv1.weight.requires_grad
    assert model.backbone.body.layer2[0].conv1.weight.requires_grad
    assert type(model.backbone.body.bn1).__name__ == "FrozenBatchNorm2d"
    byteback.prepare(model, "unified-int8", keep_float=networks.keep_float("fasterrcnn_resnet50_fpn", ()))
    blocks = {row.name: row.block for row in byteback.summary(model)}
    assert blocks["backbone.body.layer2.0.conv2"] == "conv + norm + add + relu"
    file.unlink()
    begun = run.build(config, byteback.UnifiedInt8(), 3, begun=True)  # the run's own checkpoint has the weights
    begun.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="no such checkpoint"):
        run.build(config, None, 3)


@pytest.mark.parametrize("name", networks.NAMES)
def test_backbones_fuse_and_predictors_stay_float(name: str) -> None:
    model = networks.build(name, None if name.startswith("ssd") else "resnet18", 3, 64)
    byteback.prepare(model, "unified-int8", keep_float=networks.keep_float(name, ()))
    rows = {row.name: row for row in byteback.summary(model)}
    backbone = [row for layer, row in rows.items() if layer.startswith("backbone.body.layer")]
    assert all("norm" in row.block for row in backbone) and len(backbone) == (0 if name.startswith("ssd") else 19)
    kept = [layer for layer, row in rows.items() if "kept float by" in row.note]
    assert kept and all(not isinstance(model.get_submodule(layer), Int8Layer) for layer in kept)
    assert all(any(part in layer for part in ("cls_logits", "bbox", "module_list")) for layer in kept)
    if name.startswith("retinanet"):
        towers = [row.block for layer, row in rows.items() if "_head.conv." in layer]
        assert towers == ["conv + relu"] * 8


def test_stopped_and_resumed_it_ends_in_the_same_bits(tmp_path: Path) -> None:
    """Also where boxes are sampled at random, as a Faster R-CNN does."""
    root = draw(tmp_path / "shapes", train=4, test=1, size=(64, 64))
    config = TrainConfig(
        task="detect",
        model="fasterrcnn_resnet50_fpn",
        backbone="resnet18",
        data=f"voc:{root}",
        **{"image_size": 32, "epochs": 2, "batch_size": 2, "workers": 0, "tensorboard": False},
    ).complete()
    images = tasks.load(config)
    states = []
    for name, pauses in (("whole", ()), ("parts", (1, 2))):
        member = Member(parse("unified-int8"), 0, tmp_path / name)
        for steps in pauses:
            stop = StopsAfter(steps)
            with pytest.raises(Stopped):
                run.train(config, member, images, stop, stop)
        never = StopsAfter(-1)
        run.train(config, member, images, never, never)
        last = read_lines(member.folder / "metrics.jsonl")[-1]
        states.append((last["state_sha256"], (member.folder / "detections.json").read_bytes()))
    assert states[0] == states[1]
