# SPDX-License-Identifier: Apache-2.0
"""Which layers prepare turns into int8 ones: not the first convolution, not what the user or the layer itself forbids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import byteback
from byteback import models
from byteback.convert import first_convolution
from small_convnet import images, kinds, notes, small


class OutOfOrder(nn.Module):
    """Registers its last convolution first; runs stem, body, head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(4, 4, 1)
        self.body = nn.Conv2d(4, 4, 3)
        self.stem = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)))


class OutOfOrderUntraceable(OutOfOrder):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # a branch on data, which no tracer can follow
            x = x + 1
        return super().forward(x)


class Keeping(OutOfOrder):
    """Writes to itself while it runs: attributes, lists and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Any] = []
        self.register_buffer("runs", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.last_input = x
        self.history.append(x)
        return super().forward(x)


class Counting(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        self.runs.add_(1)
        return super().forward(x)


class Noisy(OutOfOrder):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(1))


class OwnConv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + super().forward(input)


def test_the_first_convolution_in_execution_order_stays_float() -> None:
    model = byteback.prepare(OutOfOrder(), "plain-int8")
    assert kinds(model) == {"head": "Int8Conv2d", "body": "Int8Conv2d", "stem": "Conv2d"}
    assert "first convolution" in notes(model)["stem"]


def test_an_untraceable_model_falls_back_to_registration_order() -> None:
    model = byteback.prepare(OutOfOrderUntraceable(), "plain-int8")
    assert kinds(model) == {"head": "Conv2d", "body": "Int8Conv2d", "stem": "Int8Conv2d"}
    assert model(torch.randn(1, 3, 8, 8)).shape == (1, 4, 4, 4)


@pytest.mark.parametrize("model_class", [Keeping, Counting], ids=["attributes", "buffer"])
def test_tracing_leaves_no_trace_on_the_model(model_class: type[Keeping]) -> None:
    model = model_class()
    keys = set(vars(model))
    assert first_convolution(model) is model.stem, "not traced at all, so this test would prove nothing"
    assert set(vars(model)) == keys
    assert model.history == []
    assert int(model.runs) == 0


def test_tracing_draws_no_random_number() -> None:
    model = Noisy()
    before = torch.get_rng_state()
    assert first_convolution(model) is model.stem
    assert torch.equal(torch.get_rng_state(), before)


def test_a_first_convolution_of_ones_own_class_counts_as_the_first() -> None:
    """It stays float anyway, so the second one need not."""
    model = nn.Sequential(OwnConv(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    byteback.prepare(model, "plain-int8")
    assert kinds(model) == {"0": "OwnConv", "1": "Int8Conv2d", "2": "Int8Conv2d"}


def test_recipe_first_conv_converts_it_too() -> None:
    model = byteback.prepare(OutOfOrder(), byteback.PlainInt8(first_conv=True))
    assert set(kinds(model).values()) == {"Int8Conv2d"}


def test_one_convolution_under_two_names_is_one_layer() -> None:
    stem, shared = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
    model = byteback.prepare(nn.Sequential(stem, shared, nn.ReLU(), shared), "plain-int8")
    assert model[1] is model[3]
    model(images()).sum().backward()
    assert shared.quantizers.input.initialized.bool().tolist() == [True, True] + [False] * 6
    assert [row.name for row in byteback.summary(model)] == ["0", "1"]


def test_linear_stays_float_unless_the_recipe_says_so() -> None:
    assert kinds(byteback.prepare(small(), "plain-int8"))["6"] == "Linear"
    assert kinds(byteback.prepare(small(), byteback.PlainInt8(linear=True)))["6"] == "Int8Linear"


BLOCKS = [f"layer{stage}.0.conv{number}" for stage in (1, 2, 3) for number in (1, 2)]


@pytest.mark.parametrize(
    ("keep_float", "kept"),
    [
        pytest.param(["layer1.0.conv1"], ["layer1.0.conv1"], id="one-layer"),
        pytest.param(["layer1"], ["layer1.0.conv1", "layer1.0.conv2"], id="a-container"),
        pytest.param(["layer[13].0"], [name for name in BLOCKS if "layer2" not in name], id="nested-containers"),
        pytest.param(["*.conv2"], [name for name in BLOCKS if "conv2" in name], id="a-wildcard"),
        pytest.param(("layer1", "*.conv2"), [name for name in BLOCKS if name[5] == "1" or "conv2" in name], id="both"),
    ],
)
def test_keep_float_takes_wildcards_of_layers_and_of_containers(keep_float: Any, kept: list[str]) -> None:
    model = byteback.prepare(models.build("resnet8", image_size=8), "plain-int8", keep_float=keep_float)
    converted = [name for name, kind in kinds(model).items() if kind == "Int8Conv2d"]
    assert converted == [name for name in BLOCKS if name not in kept]


def test_keep_float_does_not_match_a_mere_prefix() -> None:
    model = nn.ModuleDict({"conv1": nn.Conv2d(3, 3, 1), "conv10": nn.Conv2d(3, 3, 1), "conv11": nn.Conv2d(3, 3, 1)})
    byteback.prepare(model, byteback.PlainInt8(first_conv=True), keep_float=["conv1"])
    assert kinds(model) == {"conv1": "Conv2d", "conv10": "Int8Conv2d", "conv11": "Int8Conv2d"}


def test_keep_float_says_which_wildcard_kept_a_layer() -> None:
    assert "'2'" in notes(byteback.prepare(small(), "plain-int8", keep_float=["2"]))["2"]


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        pytest.param(lambda: OwnConv(4, 4, 3), "OwnConv", id="subclass"),
        pytest.param(lambda: nn.Conv2d(4, 4, 3).double(), "float64", id="float64"),
        pytest.param(lambda: nn.Linear(4, 4), "Linear", id="linear"),
    ],
)
def test_a_layer_that_int8_cannot_serve_stays_float_and_the_summary_says_why(odd: Callable[[], nn.Module], why: str) -> None:
    layer = odd()
    original = type(layer)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), layer)
    byteback.prepare(model, "plain-int8")
    assert type(model[2]) is original
    row = byteback.summary(model)[2]
    assert (row.name, row.output, row.grad_input, row.grad_weight) == ("2", "float", "float", "float")
    assert why in row.note
