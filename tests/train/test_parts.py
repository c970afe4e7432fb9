# SPDX-License-Identifier: Apache-2.0
"""The parts of the loop: schedules, files that survive a crash, checkpoints, histograms that training does not notice."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import byteback
from byteback.train import checkpoint, files, histograms, networks, results, schedule, watch
from byteback.train.checkpoint import Progress


def test_schedules_by_hand() -> None:
    # 10 steps, 2 of them warm-up: 1/2, 1, then a cosine over 8 steps that starts at 1.
    rates = [schedule.factor("cosine", step, 10, warmup=2) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates[6] == pytest.approx(0.5) and 0.0 < rates[9] < 0.05
    assert [schedule.factor("step", step, 6, every=2, gamma=0.5) for step in range(6)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert [schedule.factor("constant", step, 3) for step in range(3)] == [1, 1, 1]


# ---- files ----


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
        with pytest.raises(OSError, match=r"No space left on device.*The one of before is still there"):
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
    with pytest.raises(ValueError, match="somebody shortened it"):
        files.Journal(path, 10_000)


def test_a_folder_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"nothing can be written in .*file/run: Not a directory"):
        files.make_folder(tmp_path / "file" / "run")


def test_two_processes_cannot_share_a_run(tmp_path: Path) -> None:
    with files.locked(tmp_path), pytest.raises(RuntimeError, match="another process is training"), files.locked(tmp_path):
        pass
    with files.locked(tmp_path):
        pass


# ---- checkpoints ----


def contents() -> dict[str, object]:
    torch.manual_seed(0)
    state = {"weight": torch.randn(3, 4), "count": torch.tensor(7)}
    data = {"model": state, "optimizer": {"lr": 0.1}, "random": torch.get_rng_state(), "lengths": {}}
    return {**data, "progress": checkpoint.as_data(Progress(epoch=2, seconds=1.5))}


def test_a_checkpoint_comes_back_and_its_fingerprint_knows_every_bit(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save(path, contents())
    loaded = checkpoint.load(path)
    assert checkpoint.progress_of(loaded).epoch == 2
    same = checkpoint.fingerprint(loaded)
    assert same == checkpoint.fingerprint(contents())
    loaded["progress"]["seconds"] = 99.0  # a time is no state
    assert checkpoint.fingerprint(loaded) == same
    loaded["model"]["weight"].view(torch.int32)[1, 2] ^= 1
    assert checkpoint.fingerprint(loaded) != same


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "other"])
def test_a_damaged_checkpoint_is_refused_by_name(how: str, tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save(path, contents())
    whole = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "flipped":
        place = whole.index(contents()["model"]["weight"].numpy().tobytes())  # type: ignore[index]
        whole[place + 5] ^= 0x10
        path.write_bytes(whole)
    elif how == "empty":
        path.write_bytes(b"")
    else:
        torch.save({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"last\.pt: (the checkpoint is damaged|this is no checkpoint).*best\.pt"):
        checkpoint.load(path)
    with pytest.raises(ValueError, match="no such checkpoint"):
        checkpoint.load(tmp_path / "absent.pt")


# ---- what is seen of the numerics ----


def digits_network(recipe: str | None) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = byteback.models.build("resnet8", image_size=8, in_channels=1)
    if recipe:
        byteback.prepare(model, recipe)
    return model, torch.randn(8, 1, 8, 8), torch.arange(8)


@pytest.mark.parametrize("recipe", [None, "unified-int8", "distribution-adaptive-int8"])
def test_training_does_not_notice_a_look_at_its_gradients(recipe: str | None) -> None:
    hashes = []
    for looks in (False, True):
        model, images, labels = digits_network(recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if recipe:
            byteback.scale_learning_rates(optimizer, model)
        for _ in range(3):
            if looks:
                model.train()
                records = histograms.look(model, images, lambda logits, y=labels: F.cross_entropy(logits, y))  # type: ignore[misc]
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
        hashes.append(checkpoint.fingerprint({**state, "progress": {}}))
    assert hashes[0] == hashes[1]
    assert len(records) == 7 and json.dumps(records)


def test_the_histograms_count_every_element() -> None:
    model, images, labels = digits_network(None)
    seen: dict[str, torch.Tensor] = {}
    layer = model.get_submodule("layer2.0.conv1")

    def keep(module: object, args: object, output: torch.Tensor) -> None:
        output.register_hook(lambda g: seen.update(g=g.clone()))

    handle = layer.register_forward_hook(keep)
    records = {record["layer"]: record for record in histograms.look(model, images, lambda y: F.cross_entropy(y, labels))}
    handle.remove()
    record, g = records["layer2.0.conv1"], seen["g"]
    assert record["structure"] == "conv 3x3 stride 2" and record["shape"] == list(g.shape)
    assert record["max"] == float(g.abs().max()) and record["zeros"] == pytest.approx(float((g == 0).float().mean()))
    assert sum(record["linear"]["counts"]) == g.numel() and len(record["linear"]["counts"]) == 101
    log = record["log2"]
    assert sum(log["counts"]) + log["below"] + log["above"] == int((g != 0).sum())
    place = int(torch.log2(g.abs().max()).floor()) - log["first"]  # the largest lies in the last bin that is not empty
    assert log["counts"][place] > 0 and not any(log["counts"][place + 1 :])
    channels = record["channels"]
    assert channels["count"] == 32 == len(channels["max"])
    for picture in channels["histograms"]:
        assert sum(picture["counts"]) == g.numel() // 32
    assert sum(record["input"]["counts"]) == 8 * 16 * 8 * 8 and sum(record["weight"]["counts"]) == layer.weight.numel()


def test_the_health_line_counts_layers_at_the_floor() -> None:
    model, images, labels = digits_network("unified-int8")
    assert str(watch.health_line(digits_network(None)[0])) == ""
    F.cross_entropy(model(images), labels).backward()
    layer = model.get_submodule("layer1.0.conv1")
    layer.quantizers.grad_output.observed.fill_(0.5)  # type: ignore[union-attr, operator]
    line = watch.health_line(model)
    assert line.layer == "layer1.0.conv1" and line.at_floor == 1 and line.deviation == 0.5
    numbers = watch.numerics(model)["layer1.0.conv1"]["grad_output"]
    assert numbers["learning_rate_factor"] == pytest.approx(0.1) and numbers["gaussian_share"] is None


# ---- networks and results ----


def test_networks_by_name() -> None:
    assert networks.channels_for("resnet20", 1) == 1 and networks.channels_for("resnet18", 1) == 3
    assert networks.check("resnet56", 32, 10, 3) == 853_018
    assert networks.check("resnet50", 32, 10, 3) > 20_000_000, "any network of torchvision, by its name"
    for name, says in (("resnet55", "resnet56"), ("mobilenetv2", "mobilenet_v2")):
        with pytest.raises(ValueError, match=f"Did you mean .*{says}"):
            networks.check(name, 32, 10, 3)
    if networks.timm() is None:
        with pytest.raises(ImportError, match="pip install timm"):
            networks.check("timm:resnet18", 32, 10, 3)


def test_the_table_pairs_seeds_with_those_of_float32() -> None:
    def member(recipe: str, seed: int, accuracy: float, speed: float) -> dict[str, object]:
        names = ("best_accuracy", "train_loss", "test_loss", "data_wait", "seconds")
        same = {"state": "finished", "folder": f"{recipe}/seed{seed}", "saved_bytes": 8 if recipe == "float32" else 4}
        return {
            "recipe": recipe,
            "seed": seed,
            "accuracy": accuracy,
            "images_per_second": speed,
            **same,
            **dict.fromkeys(names, 1.0),
        }

    found = [member("float32", 0, 0.90, 10.0), member("float32", 1, 0.92, 10.0)]
    found += [member("plain-int8", 0, 0.91, 20.0), member("plain-int8", 1, 0.90, 10.0), member("plain-int8", 2, 0.5, 9.0)]
    float_row, row = results.rows(found)
    assert float_row["difference"] is None and float_row["accuracy"] == pytest.approx(0.91)
    # differences +0.01 and -0.02: mean -0.005, sample deviation 0.03/√2, standard error that over √2 = 0.015
    assert row["difference"] == pytest.approx(-0.005) and row["difference_error"] == pytest.approx(0.015)
    assert row["ratio_to_float32"] == pytest.approx(1.5) and row["saved_ratio"] == pytest.approx(0.5)
    assert row["seeds"] == [0, 1, 2] and row["diverged"] == []
    lost = {**member("unified-int8", 0, 0.1, 1.0), "state": "diverged"}
    (*_, last) = results.rows([*found, lost])
    assert last["diverged"] == [0] and last["accuracy"] is None
    assert results.comparison([float_row, row, last])
