# SPDX-License-Identifier: Apache-2.0
"""Frozen norms as a stage of a block, against the same model without blocks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import byteback
from byteback.nn.fused.block import FusedBlock
from byteback.nn.layers.frozen_norm import FusedNorm, is_frozen_norm


class FrozenBatchNorm2d(nn.Module):
    """As torchvision has it."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.rand(channels) + 0.5)
        self.register_buffer("bias", torch.randn(channels))
        self.register_buffer("running_mean", torch.randn(channels))
        self.register_buffer("running_var", torch.rand(channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        w, b, rv, rm = (getattr(self, n).reshape(1, -1, 1, 1) for n in ("weight", "bias", "running_var", "running_mean"))
        scale = w * (rv + self.eps).rsqrt()
        return x * scale + (b - rm * scale)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, bias=False), FrozenBatchNorm2d(8)
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), FrozenBatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), FrozenBatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(x)))
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x
        return self.relu(out)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in model.parameters())]  # type: ignore[misc]


def test_it_is_a_stage_with_the_numbers_of_the_unfused_path(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = Net()
    twin = copy.deepcopy(model)
    torch.manual_seed(7)
    byteback.prepare(model, "unified-int8")
    byteback.prepare(twin, "unified-int8", fuse=False)
    seen: list[Any] = []
    original = FusedBlock.apply
    monkeypatch.setattr(FusedBlock, "apply", lambda *args: seen.append(args[6]) or original(*args))
    x = torch.randn(4, 3, 11, 11)
    for training in (True, True, False):
        seen.clear()
        model.train(training), twin.train(training)
        for a, b in zip(gradients(model, x), gradients(twin, x), strict=True):
            assert (a - b).norm() <= 0.02 * b.norm() + 1e-6
    # Not one norm is left to run by itself, and none of their buffers has moved or got a gradient.
    assert [(stages.norm is not None, stages.reached) for stages in seen] == [(True, "activation")] * 3
    for a, b in zip(model.norm1.buffers(), twin.norm1.buffers(), strict=True):
        assert torch.equal(a, b) and a.grad is None


def test_it_is_restored_copied_pickled_and_loaded() -> None:
    model = Net()
    keys = list(model.state_dict())
    byteback.prepare(model, "plain-int8")
    assert isinstance(model.norm1, FusedNorm) and isinstance(model.norm1, FrozenBatchNorm2d)
    assert list(byteback.float_state_dict(model)) == keys
    x = torch.randn(2, 3, 9, 9)
    model(x).sum().backward()
    model.eval()
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.norm1) is type(model.norm1) and torch.equal(other(x), expected)
    other = byteback.prepare(Net(), "plain-int8").eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), expected)
    assert [row.block for row in byteback.summary(model)] == ["conv + norm + relu"] * 2 + ["conv + norm + add + relu"]
    byteback.restore(model)
    assert type(model.norm1) is FrozenBatchNorm2d and list(model.state_dict()) == keys
    assert type(model(x)) is Tensor


def test_a_prepared_model_can_be_traced_again() -> None:
    model = Net()
    before = byteback.convert.graph.find_blocks(model)
    assert byteback.convert.graph.find_blocks(byteback.prepare(model, "plain-int8")) == before


def test_a_hook_on_it_sees_its_tensor() -> None:
    model = byteback.prepare(Net(), "plain-int8")
    seen = []
    model.norm1.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    model(torch.randn(2, 3, 9, 9))
    assert seen == [Tensor]


def test_a_class_of_that_name_with_another_formula_is_not_taken_for_one() -> None:
    class Other(FrozenBatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    Other.__name__ = "FrozenBatchNorm2d"
    assert is_frozen_norm(FrozenBatchNorm2d(4), 4) and not is_frozen_norm(FrozenBatchNorm2d(4), 5)
    assert not is_frozen_norm(Other(4), 4)
    assert not is_frozen_norm(nn.BatchNorm2d(4), 4)
    no_eps = FrozenBatchNorm2d(4)
    del no_eps.eps
    assert not is_frozen_norm(no_eps, 4)
