# SPDX-License-Identifier: Apache-2.0
"""Nets of a few lines, and what find_blocks says about them: for the tests of the graph pass (tests/convert/graph)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor, nn

from byteback.convert.graph import Block, Plan, find_blocks
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
