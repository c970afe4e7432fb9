# SPDX-License-Identifier: Apache-2.0
"""Batch norms and ReLUs that hand themselves to a block."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import byteback
from byteback.nn.fused.lazy import LazyConv
from byteback.nn.layers.block_stages import FusedBatchNorm, FusedReLU


def network(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, **options), nn.ReLU(inplace=True)),
        *(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8, **options), nn.ReLU()),
    )


def images() -> Tensor:
    return torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"momentum": 0.3}, {"affine": False}, {"track_running_stats": False}],
    ids=["default", "cumulative", "momentum", "not affine", "untracked"],
)
def test_the_bits_are_those_of_the_functions(options: dict[str, Any]) -> None:
    fused = byteback.prepare(network(**options), byteback.PlainInt8(strict=True))
    plain = copy.deepcopy(fused)
    for module in plain:
        if isinstance(module, (FusedBatchNorm, FusedReLU)):
            module.detach()
    assert type(plain[1]) is nn.BatchNorm2d and type(plain[2]) is nn.ReLU
    for training in (True, True, False):
        made = []
        for model in (fused, plain):
            model.train(training)
            model.zero_grad()
            output = model(images())
            output.square().sum().backward()
            made.append([output.detach(), *(parameter.grad for parameter in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
        states = fused.state_dict(), plain.state_dict()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def test_it_is_recorded_copied_pickled_and_restored() -> None:
    float_model = network()
    keys = list(float_model.state_dict())
    model = byteback.prepare(float_model, "plain-int8")
    assert isinstance(model[1], FusedBatchNorm) and isinstance(model[1], nn.BatchNorm2d) and isinstance(model[2], FusedReLU)
    assert type(model[1](model[0](images()))) is LazyConv and int(model[1].num_batches_tracked) == 1
    model.eval()
    expected = model(images())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[1]) is type(model[1]) and type(other[2]) is type(model[2])
        assert torch.equal(other(images()), expected)
    byteback.restore(model)
    assert type(model[1]) is nn.BatchNorm2d and type(model[2]) is nn.ReLU and list(model.state_dict()) == keys


def test_alone_they_are_what_they_were() -> None:
    model = byteback.prepare(network(), "plain-int8")
    x = torch.randn(2, 8, 4, 4)
    assert torch.equal(model[1](x), nn.BatchNorm2d(8)(x)) and torch.equal(model[5](x), x.relu())
    with pytest.raises(ValueError, match="4D input"):
        model[1](torch.randn(8))


def test_a_mode_sees_the_functions() -> None:
    model, seen = byteback.prepare(network(), "plain-int8"), []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    expected = model(images())
    with Mode():
        assert torch.equal(model(images()), expected)
    assert (seen.count("batch_norm") == 2 and "relu" in seen) or "relu_" in seen


def test_subclasses_and_patched_modules_stay_as_they_are() -> None:
    class Mine(nn.ReLU):
        pass

    model = network()
    model[2] = Mine()
    byteback.prepare(model, "plain-int8")
    assert type(model[2]) is Mine


@pytest.mark.parametrize("is_frozen", [False, True])
def test_another_stride_or_weight_is_seen(is_frozen: bool) -> None:
    """What is known of a call of a convolution depends on its options."""
    model = byteback.prepare(network(), byteback.PlainInt8(strict=True))
    model(images()).sum().backward()
    model.eval()
    if is_frozen:
        byteback.freeze(model)
    with torch.no_grad():
        before = model(images())
        assert torch.equal(model(images()), before)
        model[3].stride = (2, 2)
        assert model(images()).shape == (2, 8, 3, 3)
        model[3].stride = (1, 1)
        assert torch.equal(model(images()), before)
        model[4].running_mean.add_(1.0)
        assert not torch.equal(model(images()), before)
        model[4].running_mean.sub_(1.0)
    if is_frozen:
        with torch.no_grad():
            model[3].weight.mul_(2.0)
            with pytest.raises(RuntimeError, match="changed or replaced while the layer is frozen"):
                model(images())
