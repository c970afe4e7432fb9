# SPDX-License-Identifier: Apache-2.0
"""Names that our layers need: a layer of the user's that has one of them stays as it is, whatever the name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import byteback
from byteback.nn.layers.conv import FUSED_CLASSES
from byteback.nn.layers.layer import OWN_ATTRIBUTES
from byteback.nn.layers.subclass import INT8_CLASSES, own_names
from small_convnet import notes

NAMES = own_names(byteback.Int8Conv2d)


def between(middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), middle, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))


def test_the_names_are_those_of_the_classes() -> None:
    assert {"quantizers", "attach", "runs_int8", "shares_gradient", "int8_block", "_pad", *OWN_ATTRIBUTES} <= set(NAMES)
    assert not {"forward", "weight", "bias", "_load_from_state_dict", "__init__", "groups"} & set(NAMES)
    assert "_pad" not in own_names(byteback.Int8Linear)


@pytest.mark.parametrize("base", INT8_CLASSES, ids=lambda base: base.__name__)
def test_nothing_that_a_prepared_layer_has_is_left_out(base: type[nn.Module]) -> None:
    """Prepared, bound to a block and run, compared with a plain layer."""
    sizes: tuple[int, ...] = (8, 8) if base is nn.Linear else (8, 8, 3)
    recipe = byteback.PlainInt8(linear=True)
    x = torch.randn(2, 8) if base is nn.Linear else torch.randn(2, 8, *(9,) * int(base.__name__[-2]))
    plain = base(*sizes)
    model = byteback.prepare(nn.Sequential(base(*sizes), base(*sizes), nn.ReLU()), recipe)
    model(x).sum().backward()

    def names(module: nn.Module) -> set[str]:
        return {*dir(module), *module.__dict__, *module._modules, *module._buffers, *module._parameters}

    added = {name for name in names(model[1]) - names(plain) if not name.startswith(("__", "byteback_"))}
    assert added == set(own_names(INT8_CLASSES[base])) & names(model[1])
    missing = set(own_names(INT8_CLASSES[base])) - names(model[1])
    assert not missing, f"{missing} are declared and never set"


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_with_such_a_name_stays_float_and_keeps_it(name: str) -> None:
    on_object = nn.Conv2d(8, 8, 3)
    object.__setattr__(on_object, name, "mine")
    as_parameter = nn.Conv2d(8, 8, 3)
    as_parameter.register_parameter(name, nn.Parameter(torch.ones(2)))
    in_class = type("Mine", (nn.Conv2d,), {name: "mine"})(8, 8, 3)
    in_mixin = type("Mine", (nn.Conv2d, type("Mixin", (), {name: "mine"})), {})(8, 8, 3)
    for layer in (on_object, as_parameter, in_class, in_mixin):
        model = between(layer)
        before = getattr(layer, name)
        byteback.prepare(model, "plain-int8")
        assert f"it already has an attribute {name!r}" in notes(model)["1"]
        model(torch.randn(2, 3, 12, 12))
        assert getattr(layer, name) is before
        byteback.restore(model)
        assert getattr(layer, name) is before


@pytest.mark.parametrize("name", own_names(FUSED_CLASSES[nn.Conv2d]))
def test_a_float_layer_with_such_a_name_begins_no_block_and_keeps_it(name: str) -> None:
    layer: Any = nn.Conv2d(8, 8, 3)
    object.__setattr__(layer, name, "mine")
    model = between(layer)
    byteback.prepare(model, "plain-int8", keep_float=["1"])
    assert type(layer) is nn.Conv2d and getattr(layer, name) == "mine"
    assert getattr(byteback.restore(model)[1], name) == "mine"
