# SPDX-License-Identifier: Apache-2.0
"""find_blocks: who takes a block's result, modules that are called twice, and what differs between training and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from small_nets import Net, block_a, form, plan_of, reason_a

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
    assert reason_a(run) == "its 2 calls are followed by different layers"


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
