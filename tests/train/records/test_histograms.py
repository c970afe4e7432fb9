# SPDX-License-Identifier: Apache-2.0
"""Histograms and the health line count what they say, and do not change training."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import byteback
from byteback.train.checkpoints import checkpoint
from byteback.train.records import histograms, watch


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
    assert numbers["learning_rate_factor"] == pytest.approx(0.1) and "gaussian_share" not in numbers
