# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: float ones load before and after prepare, float_state_dict makes them; a saved run goes on bit for bit."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import byteback
from byteback import models
from small_convnet import RECIPES, images, small


def test_a_float_checkpoint_loads_strictly_before_and_after_prepare() -> None:
    checkpoint = {
        key: torch.randn_like(value) if value.is_floating_point() else value for key, value in small().state_dict().items()
    }
    for model in (small(), byteback.prepare(small(), "unified-int8")):
        model.load_state_dict(checkpoint, strict=True)
        for key, value in checkpoint.items():
            assert torch.equal(model.state_dict()[key], value), key


def test_a_float_checkpoint_resets_the_quantizers() -> None:
    model = byteback.prepare(small(), "unified-int8")
    model(images()).square().sum().backward()
    assert int(model[2].quantizers.count) == 1
    model.load_state_dict(small().state_dict(), strict=True)
    assert int(model[2].quantizers.count) == 1, "noise is never used twice"
    assert not bool(model[2].quantizers.grad_output.initialized.any())


def test_half_a_quantizer_state_is_an_error() -> None:
    model = byteback.prepare(small(), "unified-int8")
    state = model.state_dict()
    del state["2.quantizers.grad_output.clip"]
    with pytest.raises(RuntimeError, match=r"2\.quantizers\.grad_output\.clip"):
        model.load_state_dict(state)


@pytest.mark.parametrize("slug", RECIPES)
def test_float_state_dict_loads_strictly_into_the_original(slug: str) -> None:
    model = byteback.prepare(small(), byteback.recipes.resolve(slug))
    model(images()).sum().backward()
    state = byteback.float_state_dict(model)
    plain = small()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    plain.load_state_dict(state, strict=True)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in plain.state_dict().items())
    assert len(model.state_dict()) > len(state), "a prepared model saves its quantizers too"


def test_float_state_dict_of_a_model_that_is_itself_one_layer() -> None:
    layer = byteback.prepare(nn.Conv2d(3, 3, 3), byteback.PlainInt8(first_conv=True))
    assert sorted(byteback.float_state_dict(layer)) == ["bias", "weight"]


def _start(slug: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = byteback.prepare(models.build("resnet8", image_size=8, in_channels=1), slug)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    byteback.scale_learning_rates(optimizer, model)
    return model, optimizer


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 1, 8, 8, generator=draw), torch.randint(10, (8,), generator=draw)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("slug", RECIPES)
def test_a_saved_run_goes_on_bit_for_bit(slug: str) -> None:
    model, optimizer = _start(slug, seed=0)
    _train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    losses = _train(model, optimizer, range(3, 7))

    resumed, its_optimizer = _start(slug, seed=1)  # other weights, another noise seed: all must come from the file
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved["model"])
    its_optimizer.load_state_dict(saved["optimizer"])
    assert _train(resumed, its_optimizer, range(3, 7)) == losses

    for key, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], value), key
    for index, state in optimizer.state_dict()["state"].items():
        buffer = its_optimizer.state_dict()["state"][index]["momentum_buffer"]
        assert torch.equal(buffer, state["momentum_buffer"]), f"momentum of parameter {index}"


def test_without_its_quantizer_state_a_run_goes_on_otherwise() -> None:
    """Guards the test above: the state that is saved does steer the losses."""
    model, optimizer = _start("unified-int8", seed=0)
    _train(model, optimizer, range(3))
    resumed, its_optimizer = copy.deepcopy((model, optimizer))
    resumed.load_state_dict(byteback.float_state_dict(model))
    its_optimizer = torch.optim.SGD(resumed.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    its_optimizer.load_state_dict(optimizer.state_dict())
    byteback.scale_learning_rates(its_optimizer, resumed)
    assert _train(resumed, its_optimizer, range(3, 7)) != _train(model, optimizer, range(3, 7))


def test_a_deep_copy_trains_on_its_own() -> None:
    model = byteback.prepare(small(), "plain-int8")
    twin = copy.deepcopy(model)
    twin(images()).sum().backward()
    assert int(twin[2].quantizers.count) == 1
    assert int(model[2].quantizers.count) == 0
    assert model[2].weight.grad is None
