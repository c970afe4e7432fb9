# SPDX-License-Identifier: Apache-2.0
"""A block's prediction in one call gives the bits of the operators one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import byteback
from byteback.nn.fused import step
from byteback.ops.backends import paths
from byteback.ops.backends.cpu import library
from byteback.ops.backends.cpu.prediction import Prediction
from small_blocks import Residual

pytestmark = pytest.mark.skipif(library.native is None, reason="this build has no native library")

UNIFIED = byteback.UnifiedInt8()
RECIPES = {
    "unified": UNIFIED,
    "int8 residual": replace(UNIFIED, residual_memory="int8"),
    "bfloat16 stream": replace(UNIFIED, stream="bfloat16"),
    "clip of the batch": replace(UNIFIED, eval_clip="batch"),
}


class Net(nn.Module):
    """A stem, a residual block with a smooth activation after it, a depthwise convolution and a bias without a norm."""

    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.first, self.first_norm = nn.Conv2d(channels, channels, 3, 2, 1), nn.BatchNorm2d(channels)
        self.block = Residual(channels)
        self.deep, self.deep_norm = nn.Conv2d(channels, channels, 3, 1, 1, groups=channels), nn.BatchNorm2d(channels)
        self.plain = nn.Conv2d(channels, 2 * channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = self.block(F.silu(self.first_norm(self.first(x))))
        x = F.hardswish(self.deep_norm(self.deep(x)))
        return F.relu(self.plain(x)).mean((2, 3))


def trained(recipe: Any, last: bool) -> nn.Module:
    torch.manual_seed(7)
    model = Net().to(memory_format=torch.channels_last if last else torch.contiguous_format)
    byteback.prepare(model, recipe)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    for index in range(2):
        model(torch.randn(4, 3, 9, 7, generator=torch.Generator().manual_seed(index))).square().sum().backward()
    return model.eval()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each prediction of a block ran in one call."""
    seen: list[bool] = []
    original = Prediction.run

    def watched(self: Prediction, *args: Any) -> Any:
        made = original(self, *args)
        seen.append(made is not None)
        return made

    monkeypatch.setattr(Prediction, "run", watched)
    return seen


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_predictions_have_the_bits_of_the_operators(
    recipe: Any, last: bool, runs: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = trained(recipe, last), torch.randn(5, 3, 9, 7, generator=torch.Generator().manual_seed(9))
    for is_frozen in (False, True):
        if is_frozen:
            byteback.freeze(model)
        for x in (images, images[:1], images[:, :, :8, :5], images):
            with torch.no_grad():
                monkeypatch.setattr(step, "enabled", True)
                runs.clear()
                made = model(x)
                assert any(runs)
                monkeypatch.setattr(step, "enabled", False)
                assert torch.equal(model(x), made)


def test_a_new_weight_is_used(runs: list[bool]) -> None:
    model, images = trained(UNIFIED, True), torch.randn(2, 3, 9, 7)
    with torch.no_grad():
        before = model(images)
        model.first.weight.data = model.first.weight.data * -1.0  # autograd counts no write
        changed = model(images)
        model.first.weight.data = model.first.weight.data * -1.0
        assert not torch.equal(changed, before) and torch.equal(model(images), before) and any(runs)


def test_the_plan_of_a_path_is_its_own(runs: list[bool]) -> None:
    model, images = trained(UNIFIED, True), torch.randn(2, 3, 9, 7)
    with torch.no_grad():
        before = model(images)
        for path in paths.available():
            with byteback.path(path):
                assert torch.equal(model(images), before), path
        assert torch.equal(model(images), before)
