# SPDX-License-Identifier: Apache-2.0
"""find_blocks on the networks people train: how many blocks, of which form, what is left over and why.

Every convolution is in the plan exactly once, whatever the model, and a real run goes as planned.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from byteback import models
from byteback.convert.graph import Block, Plan, find_blocks
from small_nets import form, plan_of, torchvision_models

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
        {"also read by a hook": 2, "goes to 2 places": 3, "leaves backbone": 3, "could not be traced": 2},
    ),
    "fasterrcnn_resnet50_fpn": (
        {ACT: 33, ALL: 16, NORM: 4, "activation": 1},
        {"also read by a hook": 3, "goes to 2 places": 2, "leaves backbone": 3, "could not be traced": 2},
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
    "gelu": "gelu",
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


@pytest.mark.slow  # nothing that `make test` runs depends on how busy the machine is
def test_it_is_quick() -> None:
    model = torchvision_network("resnet50")
    times = []
    for _ in range(3):
        start = time.perf_counter()
        find_blocks(model)
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0, "two traces of half a second"
