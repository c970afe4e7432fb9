# SPDX-License-Identifier: Apache-2.0
"""--weights, --freeze, --optimizer and --ema: what fits is loaded, what does not is named, and a run resumes bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import byteback
from byteback.models import build
from byteback.torchvision_compat import load as load_torchvision
from byteback.train import compact, optimizers, weights
from byteback.train.config import TrainConfig


def network(classes: int = 10, name: str = "resnet8") -> nn.Module:
    return build(name, 8, classes, 1)


def same(one: nn.Module, other: nn.Module) -> list[str]:
    """The names of the tensors that are equal."""
    state = other.state_dict()
    return [key for key, value in one.state_dict().items() if key in state and torch.equal(value, state[key])]


@pytest.mark.parametrize("how", ["plain", "model", "state_dict", "ddp", "compiled", "prepared", "safetensors"])
def test_weights_of_every_kind_of_file_are_loaded(tmp_path: Path, how: str) -> None:
    torch.manual_seed(0)
    source, path = network(), tmp_path / ("weights.safetensors" if how == "safetensors" else "weights.pt")
    state = source.state_dict()
    if how == "safetensors":
        save_file({key: value.contiguous() for key, value in state.items()}, path)
    elif how == "prepared":
        torch.save({"model": byteback.prepare(source, "plain-int8").state_dict(), "progress": {}}, path)
    else:
        prefix = {"ddp": "module.", "compiled": "_orig_mod."}.get(how, "")
        named = {prefix + key: value for key, value in state.items()}
        torch.save({how: named} if how in ("model", "state_dict") else named, path)
    target = network()
    assert weights.fit(target, weights.read(str(path), "resnet8"), str(path), 10) == []
    assert len(same(target, source)) == len(target.state_dict())


def test_a_checkpoint_gives_the_weights_that_were_tested_and_a_newer_one_is_refused(tmp_path: Path) -> None:
    source, averaged, path = network(), network(), tmp_path / "best.pt"
    average = {f"module.{key}": value for key, value in averaged.state_dict().items()}
    contents = {"format": 1, "progress": {}, "model": source.state_dict()}
    for extra, expected in (({}, source), ({"average": average}, averaged)):
        torch.save({**contents, **extra}, path)
        target = network()
        assert weights.fit(target, weights.read(str(path), "resnet8"), str(path), 10) == []
        assert len(same(target, expected)) == len(target.state_dict())
    torch.save({**contents, "format": 2}, path)
    with pytest.raises(ValueError, match=r"the checkpoint has format 2, but this build reads 1\. Install a newer byteback\.$"):
        weights.read(str(path), "resnet8")


def test_a_head_for_other_classes_starts_anew_and_is_named(tmp_path: Path) -> None:
    torch.save(network(10).state_dict(), tmp_path / "ten.pt")
    torch.manual_seed(1)
    target = network(4)
    head = target.fc.weight.clone()
    assert weights.fit(target, weights.read(str(tmp_path / "ten.pt"), "resnet8"), "ten.pt", 4) == ["fc"]
    assert torch.equal(target.fc.weight, head)


@pytest.mark.parametrize("how", ["other network", "no state", "damaged", "absent", "another kind"])
def test_weights_that_do_not_fit_are_listed(tmp_path: Path, how: str) -> None:
    path, expected = tmp_path / "x.pt", "does not fit SmallResNet: .*is not part of the network.*, and .* more.*--model"
    if how == "other network":
        torch.save(network(10, "resnet20").state_dict(), path)
    elif how == "no state":
        torch.save({"epoch": 3}, path)
        expected = "there is no state dict in this file"
    elif how == "damaged":
        path.write_bytes(b"PK\x03\x04 nothing")
        expected = r"--weights .*x\.pt: the checkpoint is damaged"
    elif how == "absent":
        expected = "no such file"
    else:
        with pytest.raises(ValueError, match="--weights timm is for networks of timm"):
            weights.check("timm", "resnet8")
        return
    target = network()
    before = {key: value.clone() for key, value in target.state_dict().items()}
    with pytest.raises(ValueError, match=expected) as caught:
        weights.fit(target, weights.read(str(path), "resnet8"), str(path), 10)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items())


def test_weights_of_torchvision_come_from_its_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    models = load_torchvision().models
    torch.manual_seed(3)
    hub = models.get_model("squeezenet1_1", weights=None)
    asked: list[str] = []

    def stub(url: str, **_: Any) -> dict[str, torch.Tensor]:
        asked.append(url)
        return hub.state_dict()

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", stub)
    target = models.get_model("squeezenet1_1", weights=None, num_classes=7)
    state = weights.read("torchvision:DEFAULT", "squeezenet1_1")
    assert weights.fit(target, state, "torchvision:DEFAULT", 7) == ["classifier.1"]
    assert len(asked) == 1 and asked[0].endswith(".pth") and len(same(target, hub)) == len(target.state_dict()) - 2
    with pytest.raises(ValueError, match="unknown weights of torchvision for squeezenet1_1 'IMAGENET1K_V9'"):
        weights.read("torchvision:IMAGENET1K_V9", "squeezenet1_1")

    def offline(url: str, **_: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    with pytest.raises(ValueError, match=r"the download failed: no network.*download it elsewhere"):
        weights.read("torchvision:DEFAULT", "squeezenet1_1")


def test_weights_of_timm_come_from_its_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")
    made = timm.create_model("resnet10t", num_classes=1000)
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **o: made if pretrained else create(name, **o))
    target = create("resnet10t", num_classes=5)
    assert weights.fit(target, weights.read("timm", "timm:resnet10t"), "timm", 5) == ["fc"]


def test_frozen_layers_keep_their_weights_and_their_statistics() -> None:
    model = network()
    norms = weights.freeze(model, ["layer1*", "bn1"])
    assert len(norms) == 3 and not model.layer1[0].conv1.weight.requires_grad and model.fc.weight.requires_grad
    with pytest.raises(ValueError, match="unknown layer for --freeze 'layer9"):
        weights.freeze(model, ["layer9*"])
    with pytest.raises(ValueError, match="leaves nothing to train"):
        weights.freeze(model, ["*"])


@pytest.mark.parametrize("name", ["sgd", "adamw", "rmsprop", "nadam"])
def test_optimizers_have_the_names_of_torch(name: str) -> None:
    made = optimizers.build(name, [nn.Parameter(torch.zeros(2))], 0.1, 0.9, 1e-4)
    assert type(made).__name__.lower() == name and made.param_groups[0]["weight_decay"] == 1e-4
    assert made.param_groups[0].get("momentum", 0.9) == 0.9


def test_settings_that_cannot_work_are_errors() -> None:
    with pytest.raises(ValueError, match=r"unknown optimizer 'adamv'. Did you mean .*adamw"):
        TrainConfig(optimizer="adamv")
    with pytest.raises(ValueError, match=r"--ema is 1\.0; it must be between 0 and 1"):
        TrainConfig(ema=1.0)
    assert TrainConfig(optimizer="adamw").complete().lr == 1e-3 and TrainConfig().complete().lr == 0.1


# ---- best.safetensors ----


@pytest.mark.parametrize("recipe", ["unified-int8", "distribution-adaptive-int8"])
def test_compact_weights_give_the_same_predictions_in_a_quarter_of_the_bytes(tmp_path: Path, recipe: str) -> None:
    torch.manual_seed(0)
    model = byteback.prepare(build("resnet20"), recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    byteback.scale_learning_rates(optimizer, model)
    for _ in range(2):
        model(torch.randn(4, 3, 32, 32)).square().mean().backward()
        optimizer.step()
    path = tmp_path / compact.NAME
    compact.save(path, model, {"classes": 10})
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "best.pt")
    assert 4 * path.stat().st_size < (tmp_path / "best.pt").stat().st_size
    other = byteback.prepare(build("resnet20"), recipe)
    state = compact.read_state(path)
    other.load_state_dict({**other.state_dict(), **state})
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model.eval()(images), other.eval()(images))
    assert compact.facts(path)["classes"] == 10


def test_a_flipped_bit_anywhere_in_compact_weights_is_found(tmp_path: Path) -> None:
    """safetensors has no checksum: a changed tensor would be loaded silently."""
    path = tmp_path / compact.NAME
    compact.save(path, network(), {"classes": 10})
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    right = compact.read_state(path)
    places = [*range(8, header, 97), *range(header, len(whole), len(whole) // 40), len(whole) - 1]
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        if place >= header:
            with pytest.raises(ValueError, match=r"best\.safetensors: "):
                compact.facts(path)
        else:  # in the name of the checksum itself a flip does no harm, since nothing else has changed
            with contextlib.suppress(ValueError):
                found = compact.read_state(path)
                assert compact.facts(path)["classes"] == 10 and found.keys() == right.keys()
                assert all(torch.equal(value, found[key]) for key, value in right.items())


def test_files_of_others_and_of_newer_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / compact.NAME
    monkeypatch.setattr(compact, "FORMAT", 2)
    compact.save(path, network(), {})
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"has format 2, but this build reads up to 1\. Install a newer byteback"):
        compact.facts(path)
    with pytest.raises(ValueError, match=r"^train: --weights [^ ]*: the file has format 2.*Install a newer byteback\.$"):
        weights.read(str(path), "resnet8")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged"):
        compact.facts(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="not written by byteback"):
        compact.facts(path)
    (tmp_path / "absent_member").mkdir()
    with pytest.raises(ValueError, match=r"no best\.safetensors in this folder"):
        compact.file_of(path.parent / "absent_member")


def test_settings_are_part_of_what_a_resumed_run_must_keep() -> None:
    from byteback.train import config_file

    stored = config_file.settings(TrainConfig(weights="a.pt", freeze=("layer1*",), optimizer="adamw", ema=0.99, amp=True))
    assert {"weights", "freeze", "optimizer", "ema", "amp"} <= stored.keys()
    again = config_file.parse(config_file.to_text(TrainConfig(freeze=("layer1*",), ema=0.5)), Path("x"))
    assert dataclasses.replace(again) == TrainConfig(freeze=("layer1*",), ema=0.5)
