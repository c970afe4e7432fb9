# SPDX-License-Identifier: Apache-2.0
"""Norms that apply an activation themselves, as part of a block: what is found, and what it computes beside fuse=False."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import byteback
from byteback.convert.graph.norm_act import after_norm, norm_graph
from byteback.nn.fused.block import FusedBlock
from byteback.torchvision_compat import load
from small_nets import plan_of
from small_norm_act import BLOCKS, Net, NormAct


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in model.parameters())]  # type: ignore[misc]


def prepared(fuse: bool) -> nn.Module:
    torch.manual_seed(1)
    model = Net()
    torch.manual_seed(7)
    return byteback.prepare(model, byteback.UnifiedInt8(norm_memory="float32", strict=True), fuse=fuse)


def test_the_blocks_of_a_network_of_such_norms() -> None:
    plan = plan_of(Net())
    assert [block.activation_module for block in plan.blocks.values()] == ["norm.act", "norm1.act", "act", None]
    assert [block.ends for block in plan.blocks.values()] == ["activation"] * 3 + ["norm"]
    assert plan.blocks["conv3"].consumers == ("LeakyReLU norm3.act",) and plan.blocks["conv3"].feeds_other
    assert plan.blocks["conv1"].consumers == ("conv conv2",) and not plan.blocks["conv1"].feeds_other
    model = byteback.prepare(Net(), "unified-int8")
    assert [row.block for row in byteback.summary(model)] == BLOCKS


def test_it_computes_what_the_unfused_modules_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = prepared(True), prepared(False)
    seen: list[Any] = []
    original = FusedBlock.apply
    monkeypatch.setattr(FusedBlock, "apply", lambda *args: seen.append(args[6]) or original(*args))
    x = torch.randn(4, 3, 11, 11)
    for training in (True, True, False):
        seen.clear()
        model.train(training), twin.train(training)
        for a, b in zip(gradients(model, x), gradients(twin, x), strict=True):
            assert (a - b).norm() <= 0.05 * b.norm() + 1e-6
        stages = [(one.by_batch, one.activation, one.residual is not None, one.reached) for one in seen]
        assert stages == [
            (training, "relu6", False, "activation"),
            (training, "silu", False, "activation"),
            (training, "relu", True, "activation"),
            (training, "none", False, "norm"),
        ]
    for (name, a), b in zip(model.named_buffers(), twin.buffers(), strict=True):
        if "norm" in name and "quantizers" not in name:
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-3), name
    assert int(model.norm2.num_batches_tracked) == 2


def test_a_block_has_the_bits_of_the_block_of_two_modules() -> None:
    """The same block, whether the norm applies the activation or a module after it does."""
    x, results = torch.randn(4, 3, 9, 9), []
    for joined in (True, False):
        torch.manual_seed(0)
        convs = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 3)
        middle = [NormAct(8, nn.SiLU())] if joined else [nn.BatchNorm2d(8), nn.SiLU()]
        torch.manual_seed(3)
        model = byteback.prepare(nn.Sequential(convs[0], *middle, convs[1]), "unified-int8")
        results.append(gradients(model, x))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("part", ["norm1", "norm1.act"])
def test_a_hook_on_the_norm_or_its_activation_sees_tensors(part: str) -> None:
    model = prepared(True)
    seen: list[Any] = []
    model.get_submodule(part).register_forward_hook(lambda module, args, output: seen.append((type(args[0]), type(output))))
    model(torch.randn(2, 3, 9, 9))
    assert seen == [(Tensor, Tensor)]


def test_a_hook_on_its_drop_module_ends_the_block_early() -> None:
    model, twin = prepared(True), prepared(False)
    seen: list[Any] = []
    model.norm1.drop.register_forward_pre_hook(lambda module, args: seen.append(args[0] + 0.0))
    twin.norm1.drop.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    x = torch.randn(2, 3, 9, 9)
    model(x), twin(x)
    assert (seen[0] - seen[1]).norm() <= 0.02 * seen[1].norm()


class Half(nn.Module):
    """Does something in training only, as DropBlock does."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 if self.training else x


def test_what_is_no_such_norm() -> None:
    class Twice(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x * 2, self.running_mean, self.running_var, training=True)

    class Branches(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    for other in (Twice(4), Branches(4), nn.BatchNorm2d(4)):
        assert norm_graph(other, True) is None and after_norm(other) is None
    for norm in (Twice(4), Branches(4)):
        plan = plan_of(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 4, 3)))
        assert "overrides forward" in plan.reasons["0"]
    plan = plan_of(nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(4, nn.ReLU(), Half()), nn.Conv2d(4, 4, 3)))
    assert plan.reasons["0"] == "training and evaluation differ"
    plan = plan_of(nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(5, nn.ReLU()), nn.Conv2d(4, 4, 3)))
    assert "does not match" in plan.reasons["0"]


def test_what_a_norm_does_after_its_norm() -> None:
    norm, x = NormAct(4, nn.SiLU()), torch.randn(2, 4, 3, 3)
    after = after_norm(norm)
    assert after is not None and torch.equal(after(x), F.silu(x))
    assert int(norm.num_batches_tracked) == 0


def test_a_network_of_timm() -> None:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    try:
        load()  # timm imports torchvision
    except ImportError:
        pytest.skip("torchvision is not installed")
    import timm

    with torch.device("meta"):
        model = timm.create_model("mobilenetv4_conv_small")
    plan = plan_of(model)
    described = [byteback.convert.bind.describe(block) for block in plan.blocks.values()]
    assert {form: described.count(form) for form in described} == {
        **{"conv + norm + relu": 30, "conv + norm + add": 10, "conv + norm": 6},
    }
    assert not plan.reasons
