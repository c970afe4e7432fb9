# SPDX-License-Identifier: Apache-2.0
"""find_blocks: which functions and modules are stages of a block, and where a block ends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import byteback
from byteback.convert.graph import Block, find_blocks
from byteback.torchvision_compat import load
from small_nets import block_a, form, plan_of, reason_a, torchvision_models

# ---- stages ----


@pytest.mark.parametrize(
    ("function", "activation"),
    [
        (F.relu, "relu"),
        (torch.relu, "relu"),
        (torch.relu_, "relu"),
        (lambda y: F.relu(y, inplace=True), "relu"),
        (lambda y: y.relu(), "relu"),
        (lambda y: y.relu_(), "relu"),
        (F.relu6, "relu6"),
        (lambda y: F.hardtanh(y, 0, 6), "relu6"),
        (lambda y: F.hardtanh(y, max_val=6.0, min_val=0.0), "relu6"),
        (F.hardswish, "hardswish"),
        (F.silu, "silu"),
        (F.gelu, "gelu"),
        (lambda y: F.gelu(y, approximate="none"), "gelu"),
    ],
)
def test_functions_that_are_activations(function: Callable[[Tensor], Tensor], activation: str) -> None:
    block = block_a(lambda net, x: function(net.norm_a(net.a(x))))
    assert block == Block("a", "norm_a", False, activation, None, "activation", False, True, ("output",))  # type: ignore[arg-type]
    without_norm = block_a(lambda net, x: function(net.a(x)))
    assert without_norm == Block("a", None, False, activation, None, "activation", False, True, ("output",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "function",
    [
        lambda y: F.gelu(y, approximate="tanh"),
        F.hardtanh,
        lambda y: F.hardtanh(y, 0.0, 5.0),
        torch.sigmoid,
        F.leaky_relu,
    ],
)
def test_other_functions_end_the_block_at_the_norm(function: Callable[[Tensor], Tensor]) -> None:
    block = block_a(lambda net, x: function(net.norm_a(net.a(x))))
    assert (form(block), block.feeds_conv, block.feeds_other) == ("norm", False, True)
    assert "which has no fused form" in reason_a(lambda net, x: function(net.a(x)))


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (nn.GELU("tanh"), "followed by GELU act with approximate='tanh', which has no fused form"),
        (nn.Hardtanh(), "followed by Hardtanh act with min_val=-1.0, which has no fused form"),
        (nn.Hardtanh(0.0, 5.0), "followed by Hardtanh act with max_val=5.0, which has no fused form"),
        (nn.Sigmoid(), "followed by Sigmoid act, which has no fused form"),
    ],
)
def test_the_reason_names_the_argument_that_does_not_fit(act: nn.Module, reason: str) -> None:
    model = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 1), act=act))
    assert plan_of(model).reasons == {"conv": reason}


class OwnReLU(nn.ReLU):
    """A class of one's own that runs as torch's does."""


class LeakingReLU(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return F.leaky_relu(input)


@pytest.mark.parametrize(
    ("module", "activation"),
    [
        (nn.ReLU(inplace=True), "relu"),
        (nn.ReLU6(), "relu6"),
        (nn.Hardtanh(0.0, 6.0), "relu6"),
        (nn.Hardswish(), "hardswish"),
        (nn.SiLU(inplace=True), "silu"),
        (OwnReLU(), "relu"),
        (nn.Hardtanh(), "none"),
        (LeakingReLU(), "none"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "none"),
        (nn.Dropout(0.0), "none"),
    ],
)
def test_modules_that_are_activations(module: nn.Module, activation: str) -> None:
    block = plan_of(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), module)).blocks["0"]
    assert block.activation == activation
    assert block.activation_module == (None if activation == "none" else "2")
    assert block.ends == ("norm" if activation == "none" else "activation")


class OwnNorm(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class NamedNorm(nn.BatchNorm2d):
    """A class of one's own that runs as torch's does."""


@pytest.mark.parametrize(
    ("conv", "norm", "fits"),
    [
        (nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), True),
        (nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False), True),
        (nn.Conv3d(3, 4, 1), nn.BatchNorm3d(4), True),
        (nn.Conv2d(3, 4, 1), NamedNorm(4), True),
        (nn.Conv2d(3, 4, 1), OwnNorm(4), False),
        (nn.Conv2d(3, 4, 1), nn.BatchNorm2d(5), False),
        (nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4), False),
        (nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4), False),
        (nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), False),
    ],
)
def test_norms(conv: nn.Module, norm: nn.Module, fits: bool) -> None:
    plan = plan_of(nn.Sequential(conv, norm, nn.ReLU()))
    assert bool(plan.blocks) == fits
    if fits:
        assert (plan.blocks["0"].norm, plan.blocks["0"].ends) == ("1", "activation")
    else:
        assert f"followed by {type(norm).__name__} 1" in plan.reasons["0"]


def test_a_frozen_norm_of_torchvision_is_a_norm() -> None:
    frozen = torchvision_models() and load().ops.FrozenBatchNorm2d
    assert form(plan_of(nn.Sequential(nn.Conv2d(3, 4, 1), frozen(4), nn.ReLU())).blocks["0"]) == "norm activation"
    assert "0" in plan_of(nn.Sequential(nn.Conv2d(3, 4, 1), frozen(5), nn.ReLU())).reasons


class OwnConv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_a_convolution_with_a_forward_of_its_own_starts_no_block_but_takes_a_result() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), OwnConv(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    plan = plan_of(model)
    assert plan.blocks["0"].consumers == ("conv 2",)
    assert plan.reasons == {"2": "a OwnConv that overrides forward"}


def test_int8_layers_are_seen_as_what_they_were() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU())
    before = find_blocks(model)
    assert find_blocks(byteback.prepare(model, "plain-int8")) == before


def test_identity_is_looked_through_and_dropout_is_not() -> None:
    block = block_a(lambda net, x: net.same(net.relu(net.same(net.norm_a(net.same(net.a(x)))))) + x)
    assert (form(block), block.consumers) == ("norm activation", ("add",))
    assert form(block_a(lambda net, x: F.dropout(net.norm_a(net.a(x)), 0.0).relu())) == "norm"


def test_a_stage_is_swallowed_only_where_nothing_else_sees_what_is_before_it() -> None:
    def norm_twice(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.norm_a(y) + net.norm_b(y)

    def read_before_relu(net: Any, x: Tensor) -> Tensor:
        y = net.norm_a(net.a(x))
        return net.relu(y) * y

    def asked_for_its_shape(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.norm_a(y).view(y.shape[0], -1)

    def relu_for_its_effect(net: Any, x: Tensor) -> Tensor:
        y = net.norm_a(net.a(x))
        net.relu_(y)
        return y

    assert reason_a(norm_twice) == "its output goes to 2 places: BatchNorm2d norm_a, BatchNorm2d norm_b"
    assert form(block_a(read_before_relu)) == "norm"
    assert block_a(read_before_relu).consumers == ("ReLU relu", "mul")
    assert "also read by a hook or for its shape" in reason_a(asked_for_its_shape)
    assert block_a(relu_for_its_effect).consumers == ("ReLU relu_", "output")


def test_other_reasons() -> None:
    def unused(net: Any, x: Tensor) -> Tensor:
        net.a(x)
        return net.b(x)

    assert reason_a(unused) == "its output is not used"
    assert reason_a(lambda net, x: net.b(x)) == "the forward of the model does not call it"
    assert reason_a(lambda net, x: net.a(x)) == "its output is the model's output"
    assert reason_a(lambda net, x: F.conv2d(x, net.a.weight)) == "the forward of the model does not call it"
    assert plan_of(nn.Conv2d(3, 4, 1)).reasons == {"": "it is the whole model"}
