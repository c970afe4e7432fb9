# SPDX-License-Identifier: Apache-2.0
"""find_blocks: models that cannot be traced as a whole, hooks, changes in place; and reading a model leaves no mark on it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from byteback.convert.graph import Block
from byteback.convert.graph.tracing import graph_of
from small_nets import Net, form, plan_of, reason_a

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
    assert plan.reasons["parts.1.0"] == "its output leaves parts.1, which could only be traced alone"


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
        ("0.0", "register_forward_hook", "a hook reads its output"),
        ("0.0", "register_full_backward_hook", "a hook reads its output"),
        ("0.1", "register_forward_pre_hook", "followed by BatchNorm2d 0.1, but its output is also read by a hook"),
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

    assert reason_a(run) == "its input is modified in place (add) before the end of the block"


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
