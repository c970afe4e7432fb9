# SPDX-License-Identifier: Apache-2.0
"""prepare: the user's model stays the user's model.

Same object, same parameters under the same names, same hooks; and errors that say what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import byteback
from byteback import models
from byteback.nn import Int8Conv1d, Int8Conv2d, Int8Conv3d, Int8Layer, Int8Linear
from small_convnet import anatomy, images, small


def test_prepare_returns_the_same_object_with_the_same_parameters() -> None:
    model = small()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    assert byteback.prepare(model, "plain-int8") is model
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(model.get_submodule(name) is module for name, module in modules.items())


@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        pytest.param(nn.Conv1d(2, 2, 3), Int8Conv1d, id="conv1d"),
        pytest.param(nn.Conv2d(2, 2, 3), Int8Conv2d, id="conv2d"),
        pytest.param(nn.Conv3d(2, 2, 3), Int8Conv3d, id="conv3d"),
        pytest.param(nn.Linear(2, 2), Int8Linear, id="linear"),
    ],
)
def test_isinstance_of_the_torch_class_stays_true(layer: nn.Module, wanted: type[nn.Module]) -> None:
    original = type(layer)
    byteback.prepare(layer, byteback.PlainInt8(first_conv=True, linear=True))
    assert type(layer) is wanted
    assert isinstance(layer, original)


def test_an_optimizer_built_before_prepare_still_trains_the_model() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    byteback.prepare(model, "plain-int8")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(images()).square().mean().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            assert not torch.equal(parameter, before[name]), name


def test_hooks_on_a_convolution_survive_prepare_and_restore() -> None:
    model, seen = small(), []
    model[2].register_forward_hook(lambda *_: seen.append("forward"))
    model[2].register_forward_pre_hook(lambda *_: seen.append("before"))
    model[2].register_full_backward_hook(lambda *_: seen.append("backward"))
    for change in (lambda: byteback.prepare(model, "plain-int8"), lambda: byteback.restore(model)):
        change()
        seen.clear()
        model(images()).sum().backward()
        assert seen == ["before", "forward", "backward"]


def test_attributes_a_user_put_on_a_convolution_survive_prepare_and_restore() -> None:
    model = small()
    model[2].name, model[2].calls = "the second", 12
    byteback.prepare(model, "plain-int8")
    model(images())
    byteback.restore(model)
    assert getattr(model[2], "name", None) == "the second"
    assert getattr(model[2], "calls", None) == 12


def test_training_mode_is_left_as_it_was() -> None:
    model = small().eval()
    byteback.prepare(model, "plain-int8")
    assert not any(module.training for module in model if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)))


def test_preparing_twice_names_the_layer_and_the_way_out() -> None:
    model = byteback.prepare(small(), "plain-int8")
    with pytest.raises(ValueError, match=r"'2' is already an Int8Conv2d.*restore"):
        byteback.prepare(model, "plain-int8")


def test_an_unknown_recipe_gets_a_near_match() -> None:
    with pytest.raises(ValueError, match=r"unknown name 'unifed-int8'\. Did you mean unified-int8"):
        byteback.prepare(small(), "unifed-int8")


def test_a_recipe_class_instead_of_an_instance_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"UnifiedInt8\(\)"):
        byteback.prepare(small(), byteback.UnifiedInt8)


def test_a_wildcard_that_matches_nothing_names_near_layers() -> None:
    model = models.build("resnet8", image_size=8)
    with pytest.raises(ValueError, match=r"'layer1\.0\.conv9'.*layer1\.0\.conv[12]"):
        byteback.prepare(model, "plain-int8", keep_float=["layer1.0.conv9"])
    assert not any(isinstance(module, Int8Layer) for module in model.modules()), "an error must change nothing"


def test_a_string_instead_of_a_list_is_a_type_error_that_shows_the_list() -> None:
    with pytest.raises(TypeError, match=r"\['layer1'\]"):
        byteback.prepare(small(), "plain-int8", keep_float="layer1")


def test_a_model_without_convolutions_is_an_error() -> None:
    with pytest.raises(ValueError, match="no convolution and no Linear"):
        byteback.prepare(nn.Sequential(nn.ReLU()), "plain-int8")


def test_a_model_of_linear_layers_is_told_about_recipe_linear() -> None:
    with pytest.raises(ValueError, match=r"no layer left for int8.*linear"):
        byteback.prepare(nn.Sequential(nn.Linear(3, 3)), "plain-int8")


def test_everything_kept_float_is_an_error_and_changes_nothing() -> None:
    model = small()
    before = anatomy(model)
    with pytest.raises(ValueError, match="no layer left for int8"):
        byteback.prepare(model, "plain-int8", keep_float=["*"])
    assert anatomy(model) == before


@pytest.mark.parametrize(
    "function",
    [byteback.restore, byteback.enabled, byteback.float_state_dict, byteback.summary, byteback.health],
    ids=lambda function: function.__name__,
)
def test_an_unprepared_model_is_an_error_that_names_prepare(function: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(ValueError, match=rf"{function.__name__}: .*no int8 layer.*prepare"):
        function(small())


def test_only_a_module_can_be_prepared() -> None:
    with pytest.raises(TypeError, match="dict"):
        byteback.prepare({"a": 1}, "plain-int8")
