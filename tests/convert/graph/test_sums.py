# SPDX-License-Identifier: Apache-2.0
"""find_blocks: residual sums, and which of two blocks a sum belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from small_nets import Net, block_a, form, plan_of

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


@pytest.mark.parametrize("function", [F.silu, F.hardswish, F.gelu])
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
