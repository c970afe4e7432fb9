# SPDX-License-Identifier: Apache-2.0
"""find_blocks: where a block starts, what belongs to it, where it ends and who takes its result.

Each rule on a net of a few lines, then the networks people train: how many blocks, of which form, and what is left over and
why. Every convolution is in the plan exactly once, whatever the model; and reading a model leaves no mark on it.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import byteback
from byteback import models
from byteback.fuse import Block, Plan, find_blocks
from byteback.fuse.tracing import graph_of
from byteback.torchvision_compat import load


def torchvision_models() -> ModuleType:
    try:
        return load().models
    except ImportError:
        pytest.skip("torchvision is not installed")


def plan_of(model: nn.Module) -> Plan:
    """The plan, in which every convolution and every name must be a real one."""
    plan = find_blocks(model)
    convolutions = [name for name, module in model.named_modules() if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    assert sorted([*plan.blocks, *plan.reasons]) == sorted(convolutions)
    for name, block in plan.blocks.items():
        assert block.conv == name
        for other in (block.norm, block.activation_module):
            assert other is None or isinstance(model.get_submodule(other), nn.Module)
        assert block.ends == form(block).split()[-1]
        feeds = (block.feeds_conv, block.feeds_other, block.feeds_pool, block.feeds_join, block.feeds_add)
        assert any(feeds) == bool(block.consumers)
    return plan


def form(block: Block) -> str:
    """The stages of a block in words, such as 'norm add activation'."""
    stages = {"norm": block.norm is not None, "add": block.adds, "activation": block.activation != "none"}
    return " ".join(stage for stage, is_there in stages.items() if is_there)


class Net(nn.Module):
    """Two convolutions with norms, and a forward given as a function of the net and the images."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.norm_a = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.b, self.norm_b = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu, self.relu_ = nn.ReLU(), nn.ReLU(inplace=True)
        self.same = nn.Identity()
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def block_a(run: Callable[[Any, Tensor], Any]) -> Block:
    plan = plan_of(Net(run))
    assert "a" in plan.blocks, plan.reasons
    return plan.blocks["a"]


def reason_a(run: Callable[[Any, Tensor], Any]) -> str:
    plan = plan_of(Net(run))
    assert "a" in plan.reasons, plan.blocks
    return plan.reasons["a"]


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
    ],
)
def test_functions_that_are_activations(function: Callable[[Tensor], Tensor], activation: str) -> None:
    block = block_a(lambda net, x: function(net.norm_a(net.a(x))))
    assert block == Block("a", "norm_a", False, activation, None, "activation", False, True, ("output",))  # type: ignore[arg-type]
    without_norm = block_a(lambda net, x: function(net.a(x)))
    assert without_norm == Block("a", None, False, activation, None, "activation", False, True, ("output",))  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [F.gelu, F.hardtanh, lambda y: F.hardtanh(y, 0.0, 5.0), torch.sigmoid, F.leaky_relu])
def test_other_functions_end_the_block_at_the_norm(function: Callable[[Tensor], Tensor]) -> None:
    block = block_a(lambda net, x: function(net.norm_a(net.a(x))))
    assert (form(block), block.feeds_conv, block.feeds_other) == ("norm", False, True)
    assert "which has no fused form" in reason_a(lambda net, x: function(net.a(x)))


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
        (nn.GELU(), "none"),
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
    assert plan.reasons == {"2": "a OwnConv with a forward of its own"}


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
    assert "looked at before that" in reason_a(asked_for_its_shape)
    assert block_a(relu_for_its_effect).consumers == ("ReLU relu_", "output")


def test_other_reasons() -> None:
    def unused(net: Any, x: Tensor) -> Tensor:
        net.a(x)
        return net.b(x)

    assert reason_a(unused) == "its output is not used"
    assert reason_a(lambda net, x: net.b(x)) == "the model's forward never calls it"
    assert reason_a(lambda net, x: net.a(x)) == "its output is the model's output"
    assert reason_a(lambda net, x: F.conv2d(x, net.a.weight)) == "the model's forward never calls it"
    assert plan_of(nn.Conv2d(3, 4, 1)).reasons == {"": "it is the whole model"}


# ---- sums ----


def in_place(net: Any, x: Tensor) -> Tensor:
    y = net.norm_a(net.a(x))
    y += x
    return net.relu_(y)


@pytest.mark.parametrize(
    "run",
    [
        in_place,
        lambda net, x: net.relu(net.norm_a(net.a(x)) + x),
        lambda net, x: net.relu(x + net.norm_a(net.a(x))),
        lambda net, x: net.relu(torch.add(net.norm_a(net.a(x)), x)),
        lambda net, x: net.relu(torch.add(x, net.norm_a(net.a(x)), alpha=1)),
        lambda net, x: net.relu(net.norm_a(net.a(x)).add(other=x)),
        lambda net, x: net.relu(net.norm_a(net.a(x)).add_(x)),
        lambda net, x: F.relu6(net.same(net.norm_a(net.a(x))) + x),
    ],
)
def test_sums_with_a_residual(run: Callable[[Any, Tensor], Tensor]) -> None:
    block = block_a(run)
    assert (form(block), block.activation) == ("norm add activation", block.activation)
    assert block.activation in ("relu", "relu6")


def into_the_other(net: Any, x: Tensor) -> Tensor:
    y = x * 2
    y += net.norm_a(net.a(x))
    return y.relu()


def with_itself(net: Any, x: Tensor) -> Tensor:
    y = net.norm_a(net.a(x))
    return (y + y).relu()


class Offset(nn.Module):
    """Adds a parameter, which is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.offset = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Parameter(torch.zeros(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.conv(x)) + self.offset).relu()


@pytest.mark.parametrize(
    "run",
    [
        into_the_other,
        with_itself,
        lambda net, x: (net.norm_a(net.a(x)) + 1).relu(),
        lambda net, x: (net.norm_a(net.a(x)) + x.shape[0]).relu(),
        lambda net, x: torch.add(net.norm_a(net.a(x)), x, alpha=2).relu(),
        lambda net, x: (net.norm_a(net.a(x)) + F.adaptive_avg_pool2d(x, 1)).relu(),
        lambda net, x: (net.norm_a(net.a(x)) + x.mean((2, 3), keepdim=True)).relu(),
        lambda net, x: (x + net.norm_a(net.a(F.adaptive_avg_pool2d(x, 1)))).relu(),
    ],
)
def test_sums_that_stay_out(run: Callable[[Any, Tensor], Tensor]) -> None:
    assert form(block_a(run)) == "norm"


def test_sums_of_other_channels_and_of_parameters_stay_out() -> None:
    assert form(plan_of(Offset()).blocks["conv"]) == "norm"
    model = Net(lambda net, x: net.norm_a(net.a(x)) + net.norm_b(net.b(x)).relu())
    model.b, model.norm_b = nn.Conv2d(4, 1, 3, padding=1), nn.BatchNorm2d(1)
    assert form(plan_of(model).blocks["a"]) == "norm"


def test_a_sum_without_norm_or_activation_is_a_block_too() -> None:
    assert form(block_a(lambda net, x: net.a(x) + x)) == "add"
    assert form(block_a(lambda net, x: torch.relu(net.a(x) + x))) == "add activation"


@pytest.mark.parametrize("function", [F.silu, F.hardswish])
def test_smooth_activations_after_a_sum_stay_out(function: Callable[[Tensor], Tensor]) -> None:
    block = block_a(lambda net, x: function(net.norm_a(net.a(x)) + x))
    assert (form(block), block.consumers) == ("norm add", (function.__name__,))


def in_place_shortcut_first(net: Any, x: Tensor) -> Tensor:
    y = net.norm_b(net.b(x))
    y += net.norm_a(net.a(net.relu(net.same(x))))
    return net.relu(y)


@pytest.mark.parametrize(
    ("run", "owner"),
    [
        (lambda net, x: net.relu(net.norm_a(net.a(x)) + net.norm_b(net.b(x))), "a"),
        (lambda net, x: net.relu(net.norm_b(net.b(x)) + net.norm_a(net.a(x))), "b"),
        (in_place_shortcut_first, "b"),
    ],
)
def test_a_sum_of_two_blocks_belongs_to_the_left_one(run: Callable[[Any, Tensor], Tensor], owner: str) -> None:
    plan = plan_of(Net(run))
    other = {"a": "b", "b": "a"}[owner]
    assert (form(plan.blocks[owner]), form(plan.blocks[other])) == ("norm add activation", "norm")
    assert (plan.blocks[other].feeds_conv, plan.blocks[other].consumers) == (False, ("add",))


class Shortcut(nn.Module):
    """A residual block with two convolutions in the body and one in the shortcut, which comes first or last."""

    def __init__(self, shortcut_first: bool, in_place: bool = False) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
        self.shortcut = nn.Sequential(nn.Conv2d(4, 4, 5), nn.BatchNorm2d(4))
        self.shortcut_first, self.in_place = shortcut_first, in_place

    def forward(self, x: Tensor) -> Tensor:
        one, other = (self.shortcut, lambda x: self.two(self.one(x)))
        left, right = (one, other) if self.shortcut_first else (other, one)
        y = left(x)
        if self.in_place:
            y += right(x)
        else:
            y = y + right(x)
        return y.relu_()


@pytest.mark.parametrize(
    ("shortcut_first", "in_place", "owner"),
    [(False, False, "two.0"), (True, False, "two.0"), (False, True, "two.0"), (True, True, "shortcut.0")],
)
def test_the_body_owns_the_sum_unless_it_is_written_into_the_shortcut(shortcut_first: bool, in_place: bool, owner: str) -> None:
    blocks = plan_of(Shortcut(shortcut_first, in_place)).blocks
    other = {"two.0": "shortcut.0", "shortcut.0": "two.0"}[owner]
    assert (form(blocks[owner]), form(blocks[other])) == ("norm add activation", "norm")


def test_a_bare_convolution_whose_sum_belongs_to_another_says_so() -> None:
    plan = plan_of(Net(lambda net, x: net.relu(net.norm_b(net.b(x)) + net.a(x))))
    assert plan.reasons == {"a": "the sum after it belongs to the block of b"}


def test_three_terms() -> None:
    plan = plan_of(Net(lambda net, x: net.relu(net.norm_a(net.a(x)) + x + net.norm_b(net.b(x)))))
    assert (form(plan.blocks["a"]), form(plan.blocks["b"])) == ("norm add", "norm add activation")


# ---- takers ----


def test_takers() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        y = net.relu(net.norm_a(net.a(x)))
        return net.b(y) + F.max_pool2d(y, 1).view(y.size()) + y

    block = block_a(run)
    assert (block.feeds_conv, block.feeds_other) == (True, True)
    assert block.consumers == ("conv b", "max_pool2d", "add")
    block = block_a(lambda net, x: net.b(F.max_pool2d(net.relu(net.a(x)), 2)))
    assert (block.feeds_conv, block.feeds_other, block.feeds_pool) == (False, False, True)
    assert block.consumers == ("max_pool2d",)
    block = block_a(lambda net, x: net.b(torch.cat([net.relu(net.a(x)), x], dim=1)))
    assert (block.feeds_other, block.feeds_join, block.join_feeds_conv, block.join_feeds_other) == (False, True, True, False)
    block = block_a(lambda net, x: torch.cat([net.relu(net.a(x)), x]))
    assert (block.feeds_other, block.feeds_join) == (True, False)  # the other axis


# ---- several calls, several names ----


def test_a_shared_activation_is_named_in_each_block() -> None:
    plan = plan_of(Net(lambda net, x: net.relu(net.norm_b(net.b(net.relu(net.norm_a(net.a(x))))))))
    assert [plan.blocks[name].activation_module for name in "ab"] == ["relu", "relu"]


def test_a_convolution_called_twice_alike_is_one_block_with_all_takers() -> None:
    block = block_a(lambda net, x: net.b(net.relu(net.norm_a(net.a(x)))) + net.relu(net.norm_a(net.a(x * 2))).mean())
    assert (form(block), block.consumers) == ("norm activation", ("conv b", "mean"))
    assert (block.feeds_conv, block.feeds_other) == (True, True)


@pytest.mark.parametrize(
    "run",
    [
        lambda net, x: (net.relu(net.norm_a(net.a(x))), net.relu(net.norm_b(net.a(x)))),
        lambda net, x: (net.relu(net.norm_a(net.a(x))), net.norm_a(net.a(x))),
        lambda net, x: (net.relu(net.norm_a(net.a(x))), net.a(x)),
        lambda net, x: net.norm_a(net.a(x)) + net.norm_a(net.a(x)),
    ],
)
def test_a_convolution_called_twice_in_two_ways_has_no_block(run: Callable[[Any, Tensor], Any]) -> None:
    assert reason_a(run) == "called at 2 places that differ"


def test_of_two_names_the_first_counts() -> None:
    model = Net(lambda net, x: net.relu_again(net.norm_again(net.a_again(x))))
    model.a_again, model.norm_again, model.relu_again = model.a, model.norm_a, model.relu
    assert plan_of(model).blocks["a"] == block_a(lambda net, x: net.relu(net.norm_a(net.a(x))))


# ---- training and evaluation ----


def test_what_differs_between_training_and_evaluation_is_left_alone() -> None:
    run = lambda net, x: net.relu(net.norm_a(net.a(x))) if net.training else net.norm_a(net.a(x))  # noqa: E731
    assert reason_a(run) == "training and evaluation differ"


def test_what_runs_in_one_of_them_only_is_a_block_and_takers_of_both_count() -> None:
    def run(net: Any, x: Tensor) -> Any:
        y = net.relu(net.norm_a(net.a(x)))
        return (y, net.relu(net.norm_b(net.b(y)))) if net.training else y.mean()

    plan = plan_of(Net(run))
    assert plan.blocks["a"].consumers == ("conv b", "output", "mean")
    assert form(plan.blocks["b"]) == "norm activation"


def test_where_one_of_them_cannot_be_traced_the_takers_are_unknown() -> None:
    def run(net: Any, x: Tensor) -> Any:
        if net.training and x.sum() > 0:
            return x
        return net.b(net.relu(net.norm_a(net.a(x))))

    block = block_a(run)
    assert (form(block), block.feeds_conv, block.feeds_other) == ("norm activation", True, True)


# ---- what cannot be traced as a whole ----


def conv_norm_relu() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())


class Undecided(nn.Module):
    """An if on the data around a structure of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.body = conv_norm_relu()
        self.parts = nn.ModuleList([conv_norm_relu(), nn.Sequential(nn.Conv2d(4, 4, 1))])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(x))
        if x.mean() > 0:
            x = self.body(x)
        return self.parts[1](self.parts[0](x))


def test_structure_by_structure() -> None:
    plan = plan_of(Undecided())
    assert set(plan.blocks) == {"body.0", "parts.0.0"}
    assert plan.blocks["body.0"] == Block(
        "body.0", "body.1", False, "relu", "body.2", "activation", True, True, ("outside of body",)
    )
    assert plan.reasons["stem"].startswith("its module could not be traced: Undecided: ")
    assert plan.reasons["parts.1.0"] == "its output leaves parts.1, which could be traced only alone"


def test_around_a_black_box_the_graph_goes_on() -> None:
    model = nn.Sequential(conv_norm_relu(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), Undecided(), nn.Conv2d(4, 4, 1), nn.ReLU())
    plan = plan_of(model)
    assert set(plan.blocks) == {"0.0", "1", "4", "3.body.0", "3.parts.0.0"}
    assert plan.blocks["0.0"].consumers == ("conv 1",), "the blocks before the box were seen apart"
    assert (form(plan.blocks["1"]), plan.blocks["1"].consumers) == ("norm", ("Undecided 3",))
    assert (plan.blocks["1"].feeds_conv, plan.blocks["1"].feeds_other) == (True, True)


def test_a_module_that_cannot_be_copied_is_a_black_box() -> None:
    model = nn.Sequential(conv_norm_relu(), Net(lambda net, x: net.a(x)))
    model[1].generator = (number for number in range(3))
    plan = plan_of(model)
    assert set(plan.blocks) == {"0.0"}
    assert "Net: cannot pickle 'generator' object" in plan.reasons["1.a"]


# Not in a function: pytest rewrites the assertions of this file, and a user's are not rewritten.
OPTIONS = """
def forward(self, x, mask=None, features=False):
    assert x.dim() == 4
    assert x.shape[1] == 4, f"images with {x.shape[1]} channels"
    y = self.norm_a(self.a(x))
    if mask is not None:
        y = y * mask
    return y if features else self.relu(y)
"""


def test_defaults_and_assertions_do_not_stop_the_tracing() -> None:
    members: dict[str, Any] = {}
    exec(OPTIONS, members)
    model = type("Options", (Net,), {"forward": members["forward"]})(None)
    assert form(plan_of(model).blocks["a"]) == "norm activation"


@pytest.mark.parametrize("condition", ["if x.sum() > 0: assert False", "if not x.sum() > 0: y = x", "y = x.sum() > 0 or x"])
def test_other_conditions_do(condition: str) -> None:
    members: dict[str, Any] = {}
    exec(f"def forward(self, x):\n    {condition}\n    return self.relu(self.a(x))", members)
    model = type("Conditional", (Net,), {"forward": members["forward"]})(None)
    assert "control flow" in plan_of(model).reasons["a"]


def test_a_replaced_forward_is_not_traced() -> None:
    model = conv_norm_relu()
    model.forward = lambda x: x  # type: ignore[method-assign]
    assert "forward was replaced" in plan_of(model).reasons["0"]


# ---- hooks ----


def seen(*args: Any) -> None:
    raise AssertionError("the hook was run")


@pytest.mark.parametrize(
    ("name", "register", "wanted"),
    [
        ("0.0", "register_forward_pre_hook", "norm activation"),
        ("0.0", "register_forward_hook", "a hook wants to see its output"),
        ("0.0", "register_full_backward_hook", "a hook wants to see its output"),
        ("0.1", "register_forward_pre_hook", "followed by BatchNorm2d 0.1, but its output is looked at before that"),
        ("0.1", "register_forward_hook", "norm"),
        ("0.2", "register_forward_pre_hook", "norm"),
        ("0.2", "register_forward_hook", "norm activation"),
        ("", "register_forward_hook", "norm activation"),
    ],
)
def test_a_hook_sees_finished_tensors(name: str, register: str, wanted: str) -> None:
    model = nn.Sequential(conv_norm_relu())
    getattr(model.get_submodule(name), register)(seen)
    plan = plan_of(model)
    found = form(plan.blocks["0.0"]) if plan.blocks else plan.reasons["0.0"]
    assert found.startswith(wanted)


class Watcher:
    """Its hook is a method, so a copy of the hook would be a copy of all this."""

    def __init__(self) -> None:
        self.stream = (number for number in range(3))  # cannot be copied

    def hook(self, *args: Any) -> None:
        seen(*args)


def test_hooks_are_neither_run_nor_copied() -> None:
    model = nn.Sequential(conv_norm_relu(), conv_norm_relu())
    model[0].register_forward_hook(Watcher().hook)
    model[0].register_forward_pre_hook(Watcher().hook)
    assert len(graph_of(model).nodes) == 8
    assert set(plan_of(model).blocks) == {"0.0", "1.0"}


def test_no_block_reaches_across_a_container_with_a_hook() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU())
    assert form(plan_of(model).blocks["0.0"]) == "norm activation"
    model[0].register_forward_hook(seen)
    plan = plan_of(model)
    assert (form(plan.blocks["0.0"]), plan.blocks["0.0"].consumers) == ("norm", ("outside of 0",))
    assert form(plan.blocks["2"]) == "activation"


# ---- in place ----


def test_a_block_is_not_put_off_past_a_change_of_its_input() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        x = x * 2
        y = net.a(x)
        x += 1
        return net.relu(net.norm_a(y)) + x

    assert reason_a(run) == "its input is changed in place (add) before its block would be complete"


# ---- no mark ----


class Marking(nn.Module):
    """Does in its forward what a forward should not do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.history: list[Any] = []
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.history.append(x)
        self.last = x * (torch.rand(()).item() + random.random() + np.random.rand())
        return self.norm(self.conv(self.last)).relu_()


@pytest.mark.filterwarnings("error")
def test_finding_blocks_leaves_no_mark() -> None:
    model = Marking().eval()
    keys, state = set(vars(model)), {name: value.clone() for name, value in model.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    assert form(plan_of(model).blocks["conv"]) == "norm activation"
    assert set(vars(model)) == keys
    assert not model.history
    assert not model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == generators[1:]  # type: ignore[index, union-attr]


# ---- networks ----

NORM, ADD, ACT = "norm", "norm add", "norm activation"
ALL = "norm add activation"
# The name: forms of the blocks and how many of each, then what the reasons say and how often.
NETWORKS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "resnet18": ({ACT: 9, ALL: 8, NORM: 3}, {}),
    "resnet50": ({ACT: 33, ALL: 16, NORM: 4}, {}),
    "resnext50_32x4d": ({ACT: 33, ALL: 16, NORM: 4}, {}),
    "mobilenet_v2": ({ACT: 35, NORM: 7, ADD: 10}, {}),
    "mobilenet_v3_small": ({ACT: 23, NORM: 5, ADD: 6, "activation": 9}, {"Hardsigmoid": 9}),
    "vgg16": ({"activation": 13}, {}),
    "vgg16_bn": ({ACT: 13}, {}),
    "alexnet": ({"activation": 5}, {}),
    "squeezenet1_0": ({"activation": 26}, {}),
    "inception_v3": ({ACT: 96}, {}),
    "googlenet": ({ACT: 59}, {}),
    "efficientnet_b0": ({ACT: 33, NORM: 16, "activation": 16}, {"Sigmoid": 16}),
    "densenet121": ({ACT: 59}, {"cat": 58, "AvgPool2d": 3}),
    "shufflenet_v2_x1_0": ({ACT: 37, NORM: 19}, {}),
    "regnet_y_400mf": ({ACT: 33, NORM: 4, ALL: 16, "activation": 16}, {"Sigmoid": 16}),
    "mnasnet0_5": ({ACT: 35, NORM: 7, ADD: 10}, {}),
    "r3d_18": ({ACT: 9, ALL: 8, NORM: 3}, {}),
    "convnext_tiny": ({}, {"permute": 19, "goes to 2 places": 3}),
    "fcn_resnet50": ({ACT: 34, ALL: 16, NORM: 4}, {"interpolate": 1}),
    "retinanet_resnet50_fpn": (
        {ACT: 33, ALL: 16, NORM: 4, "activation": 8},
        {"looked at before": 2, "goes to 2 places": 3, "leaves backbone": 3, "could not be traced": 2},
    ),
    "fasterrcnn_resnet50_fpn": (
        {ACT: 33, ALL: 16, NORM: 4, "activation": 1},
        {"looked at before": 3, "goes to 2 places": 2, "leaves backbone": 3, "could not be traced": 2},
    ),
}


def torchvision_network(name: str) -> nn.Module:
    options: dict[str, Any] = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    if name.endswith(("_fpn", "fcn_resnet50")):
        options["weights_backbone"] = None
    network = torchvision_models().get_model
    if name == "regnet_y_400mf":  # computes its widths with tensors
        return network(name, weights=None)
    with torch.device("meta"):  # no time spent on weights that nobody reads
        return network(name, weights=None, **options)


@pytest.mark.parametrize("name", NETWORKS)
def test_torchvision_networks(name: str) -> None:
    model = torchvision_network(name)
    plan = plan_of(model)
    forms, reasons = NETWORKS[name]
    assert Counter(form(block) for block in plan.blocks.values()) == forms
    for words, count in reasons.items():
        assert sum(words in reason for reason in plan.reasons.values()) == count, (words, plan.reasons)
    assert len(plan.reasons) == sum(reasons.values()), plan.reasons


def test_resnet18_in_detail() -> None:
    blocks = plan_of(torchvision_network("resnet18")).blocks
    assert blocks["conv1"] == Block(
        "conv1", "bn1", False, "relu", "relu", "activation", False, False, ("MaxPool2d maxpool",), feeds_pool=True
    )
    first = blocks["layer1.0.conv1"]
    assert (first.norm, first.activation_module, first.consumers) == ("layer1.0.bn1", "layer1.0.relu", ("conv layer1.0.conv2",))
    assert (first.feeds_conv, first.feeds_other) == (True, False)
    second = blocks["layer1.1.conv2"]
    assert (second.adds, second.feeds_conv, second.feeds_other) == (True, True, False)
    assert second.consumers == ("conv layer2.0.conv1", "conv layer2.0.downsample.0")
    assert blocks["layer2.0.conv2"].consumers == ("conv layer2.1.conv1", "add")
    assert (blocks["layer2.0.conv2"].feeds_add, blocks["layer2.0.conv2"].feeds_other) == (True, False)
    shortcut = blocks["layer2.0.downsample.0"]
    assert (shortcut.norm, shortcut.ends, shortcut.consumers) == ("layer2.0.downsample.1", "norm", ("add",))
    assert blocks["layer4.1.conv2"].consumers == ("AdaptiveAvgPool2d avgpool",)


def test_the_body_of_a_regnet_owns_the_sum_although_it_is_on_the_right() -> None:
    blocks = plan_of(torchvision_network("regnet_y_400mf")).blocks
    assert form(blocks["trunk_output.block1.block1-0.proj.0"]) == NORM
    assert form(blocks["trunk_output.block1.block1-0.f.c.0"]) == ALL


def test_a_detector_is_read_structure_by_structure() -> None:
    plan = plan_of(torchvision_network("retinanet_resnet50_fpn"))
    body = {name for name in plan.blocks if name.startswith("backbone.body.")}
    assert len(body) == 53
    assert plan.blocks["backbone.body.layer1.0.conv1"].consumers == ("conv backbone.body.layer1.0.conv2",)
    # The head's convolutions run over every level of the pyramid, one after another, with their bias.
    heads = [plan.blocks[f"head.classification_head.conv.{number}.0"] for number in range(4)]
    assert [form(block) for block in heads] == ["activation"] * 4
    assert heads[2].consumers == ("conv head.classification_head.conv.3.0",)
    assert (heads[3].feeds_conv, heads[3].feeds_other) == (True, True)
    assert "RetinaNetClassificationHead" in plan.reasons["head.classification_head.cls_logits"]


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("resnet8", {ACT: 4, ALL: 3}),
        ("resnet20", {ACT: 10, ALL: 9}),
        ("resnet18", {ACT: 9, ALL: 8, NORM: 3}),
        ("mobilenet_v2", {ACT: 35, NORM: 7, ADD: 10}),
        ("vgg16_bn", {ACT: 13}),
        ("inception_v3", {ACT: 94}),
        ("alexnet", {"activation": 5}),
    ],
)
def test_our_own_small_networks(name: str, forms: dict[str, int]) -> None:
    if not name.startswith(("resnet8", "resnet20")):
        torchvision_models()
    with torch.device("meta"):
        plan = plan_of(models.build(name))
    assert Counter(form(block) for block in plan.blocks.values()) == forms
    assert not plan.reasons
    if name == "resnet20":
        assert plan.blocks["conv1"].consumers == ("conv layer1.0.conv1", "add")
        assert plan.blocks["layer1.0.conv2"].activation_module == "layer1.0.relu2"


# ---- a plan against what a real run does ----

STAGE_OF = {"batch_norm": "norm", "add": "add", "add_": "add", "__add__": "add", "__iadd__": "add", "__radd__": "add"}
ACTIVATION_OF = {
    "relu": "relu",
    "relu_": "relu",
    "relu6": "relu6",
    "hardtanh": "relu6",
    "hardswish": "hardswish",
    "silu": "silu",
}
METADATA = ("__get__", "dim", "size", "numel")


class Follow(TorchFunctionMode):
    """Sees every operation of a run, and carries each block of a plan from its convolution to its end."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self.blocks = {id(model.get_submodule(name).weight): block for name, block in plan.blocks.items()}
        self.pending: dict[int, tuple[Block, str]] = {}  # by the id of a tensor: its block, and the last stage done
        self.done: dict[int, Block] = {}
        self.completed: Counter[str] = Counter()
        self.alive: list[Tensor] = []  # so that no id is given twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in METADATA or not isinstance(result, Tensor):
            return result
        is_conv = name in ("conv1d", "conv2d", "conv3d")
        flat = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else [arg]) if isinstance(item, Tensor)]
        begun = [item for item in flat if id(item) in self.pending]
        for item in flat:
            if block := self.done.get(id(item)):
                known = {"cat": "feeds_join", "max_pool2d": "feeds_pool", "avg_pool2d": "feeds_pool"} | {
                    n: "feeds_add" for n, s in STAGE_OF.items() if s == "add"
                }
                feeds = "feeds_conv" if is_conv else known.get(name, "feeds_other")
                assert getattr(block, feeds) or block.feeds_other, f"{name} takes the result of {block}"
        self.alive.append(result)
        self.done.pop(id(result), None)  # written in place
        if begun:
            assert len(begun) == 1, "a block waits for another one that waits"
            self.reach(result, *self.pending.pop(id(begun[0])), name, [item for item in flat if item is not begun[0]])
        elif is_conv and (block := self.blocks.get(id(args[1]))):
            self.pending[id(result)] = (block, "conv")
        return result

    def reach(self, result: Tensor, block: Block, last: str, name: str, others: list[Tensor]) -> None:
        stages = ["conv", *form(block).split()]
        stage = "activation" if ACTIVATION_OF.get(name) == block.activation else STAGE_OF.get(name)
        assert stage == stages[stages.index(last) + 1], f"{name} comes after {last} of {block}"
        assert stage != "add" or [other.shape for other in others] == [result.shape]
        if stage == block.ends:
            self.completed[block.conv] += 1
            self.done[id(result)] = block
        else:
            self.pending[id(result)] = (block, stage)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    "name",
    [
        *("resnet18", "mobilenet_v2", "mobilenet_v3_small", "googlenet", "densenet121", "efficientnet_b0", "squeezenet1_0"),
        *("shufflenet_v2_x1_0", "regnet_y_400mf", "r3d_18", "vgg16", "inception_v3", "resnet20"),
    ],
)
def test_a_real_run_goes_as_planned(name: str, training: bool) -> None:
    model = models.build(name) if name == "resnet20" else torchvision_network(name)
    model = model.to("meta").train(training)  # no number is needed to see which operation follows which
    size = {"inception_v3": (299, 299), "r3d_18": (4, 32, 32), "resnet20": (32, 32)}.get(name, (64, 64))
    plan = plan_of(model)
    with Follow(model, plan) as run:
        model(torch.empty(2, 3, *size, device="meta"))
    assert not run.pending
    only_in_training = {conv for conv in plan.blocks if conv.startswith(("AuxLogits.", "aux1.", "aux2."))}
    assert set(run.completed) == plan.blocks.keys() - (set() if training else only_in_training)


def test_it_is_quick() -> None:
    model = torchvision_network("resnet50")
    times = []
    for _ in range(3):
        start = time.perf_counter()
        find_blocks(model)
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0, "two traces of half a second"
