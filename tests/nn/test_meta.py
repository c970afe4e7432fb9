# SPDX-License-Identifier: Apache-2.0
"""A model that is prepared without memory (device "meta") and gets memory and weights later."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import byteback
from byteback.ops.contract.limits import NUMERICS_VERSION
from small_blocks import Net

RECIPES = ["plain-int8", "unified-int8", "distribution-adaptive-int8"]
X = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture(autouse=True)
def _memory_holds_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.empty_like finds in memory is chance, and often 0; here it never is."""
    original = torch.empty_like

    def dirty(like: Tensor, **options: object) -> Tensor:
        made = original(like, **options)  # type: ignore[call-overload]
        if not made.is_meta and made.device.type == "cpu":
            made.fill_(1e30 if made.is_floating_point() else 139855809944896 if made.dtype is torch.int64 else 7)
        return made

    monkeypatch.setattr(torch, "empty_like", dirty)


def on_meta(recipe: str) -> nn.Module:
    torch.manual_seed(3)
    with torch.device("meta"):
        return byteback.prepare(Net(), recipe)


def floats() -> dict[str, Tensor]:
    torch.manual_seed(4)
    return Net().state_dict()


def numerics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if ".quantizers." in name}


def step(model: nn.Module) -> Tensor:
    output: Tensor = model(X)
    output.square().sum().backward()
    return output.detach()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("how", ["to_empty", "assign"])
def test_a_float_checkpoint_fills_it(recipe: str, how: str) -> None:
    model = on_meta(recipe)
    if how == "to_empty":
        model.to_empty(device="cpu")
    model.load_state_dict(floats(), strict=True, assign=how == "assign")
    expected = Net()
    expected.load_state_dict(floats())
    torch.manual_seed(3)
    byteback.prepare(expected, recipe)
    for name, buffer in numerics(expected).items():
        if not name.endswith(".layer"):  # without weights a model has a number for its noise that is not of their contents
            assert torch.equal(numerics(model)[name], buffer), name
    assert int(model.down.quantizers.numerics_version) == NUMERICS_VERSION
    assert torch.equal(step(model), step(expected))
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


def test_it_has_sane_numerics_before_anything_is_loaded() -> None:
    model = on_meta("unified-int8").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *(m.running_mean for m in model.modules() if isinstance(m, nn.BatchNorm2d))):
            tensor.fill_(0.1)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_var.fill_(1.0)
                module.num_batches_tracked.zero_()
    assert step(model).isfinite().all()
    assert int(model.down.quantizers.count) == 1


def test_weights_that_hold_garbage_are_named() -> None:
    model = on_meta("unified-int8").to_empty(device="cpu")
    with torch.no_grad():
        model.stem.weight.fill_(0.1)
        model.down.weight.fill_(float("nan"))
        for name, parameter in model.named_parameters():
            if "down" not in name:
                parameter.fill_(0.1)
    with pytest.raises(byteback.NonFiniteError, match=r"down: weight holds \d+ NaN"):
        model(X)


def test_an_int8_checkpoint_fills_it() -> None:
    torch.manual_seed(3)
    source = byteback.prepare(Net(), "unified-int8")
    step(source)
    for assign in (False, True):
        model = on_meta("unified-int8")
        if not assign:
            model.to_empty(device="cpu")
        model.load_state_dict(copy.deepcopy(source.state_dict()), strict=True, assign=assign)
        assert all(torch.equal(value, source.state_dict()[key]) for key, value in model.state_dict().items())
        assert int(model.down.quantizers.count) == 1


def test_numerics_survive_to_empty_of_a_model_with_memory() -> None:
    """What they know does not come with the weights, so that nobody would write it again."""
    torch.manual_seed(3)
    model = byteback.prepare(Net(), "unified-int8")
    step(model)
    before = numerics(model)
    model.to_empty(device="cpu")
    assert all(torch.equal(buffer, before[name]) for name, buffer in numerics(model).items())
    model.load_state_dict(floats())
    assert int(model.down.quantizers.count) == 1, "noise is never used twice"
    assert not model.down.quantizers.input.seen.any()


def test_a_layer_by_itself() -> None:
    layer = byteback.Int8Conv2d(16, 16, 3, recipe=byteback.PlainInt8(strict=True), device="meta").to_empty(device="cpu")
    torch.manual_seed(0)
    layer.load_state_dict(nn.Conv2d(16, 16, 3).state_dict())
    layer(torch.randn(2, 16, 6, 6)).sum().backward()
    assert int(layer.quantizers.count) == 1


def test_shapes_can_be_asked_without_memory() -> None:
    model = on_meta("unified-int8")
    assert model(torch.empty(4, 3, 12, 12, device="meta")).shape == (4, 5)
    assert byteback.Int8Linear(64, 32, device="meta")(torch.empty(2, 64, device="meta")).shape == (2, 32)
