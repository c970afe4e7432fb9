# SPDX-License-Identifier: Apache-2.0
"""A quantizer's step and whole training steps on the GPU's backend in Triton's interpreter: the state of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import byteback
from byteback.ops import noise_key, quantizer
from byteback.quantize import Moment, Quantizer, Settings, TensorRule
from byteback.recipes.unified import DirectionSensitive
from deferring import deferring
from interpreted import interpreting
from same_bits import assert_same_bits
from small_blocks import Residual

C = 6
ALWAYS = DirectionSensitive(period=3, band=1.0, search_when_saturated=1e-9)
LITERAL = DirectionSensitive(period=2, search_after_zero=None, tie=None, search_when_saturated=None)


def steps_of(rule: DirectionSensitive, per: str, bad: int, count: int = 6) -> list[Tensor]:
    """The results and the state after each of a few gradients: one is zero, one large, one has NaN."""
    setting = TensorRule(clip=rule, rounding="stochastic", per=per)
    settings = Settings(setting, "grad_output", "layer", "skip", 3, 0.1, by_channel=per == "K")
    own, nonfinite, seen = Quantizer(rule.entries(C if per == "K" else 1), False), torch.zeros((), dtype=torch.int64), []
    draw = torch.Generator().manual_seed(1)
    for step in range(count):
        x = torch.randn(2, C, 5, 7, generator=draw) * torch.exp(torch.randn(2, C, 5, 7, generator=draw))
        x = x.contiguous(memory_format=torch.channels_last) * (0.0 if step == 1 else 4.0 if step == 2 else 1.0)
        if step == bad:
            x[0, 0, 0, 0] = float("nan")
        key, state = noise_key(torch.tensor(1), torch.tensor(2), torch.tensor(step)), own.state(nonfinite)
        q = quantizer.step(x, state, settings, key, Moment(torch.tensor(step), 0, True))
        seen += [q.values.clone(), q.scale.clone(), *(part.clone() for part in state if part is not None)]
    return seen


def test_a_search_has_the_state_of_the_reference() -> None:
    """The first step searches on the coarse and the fine grid."""
    rule = DirectionSensitive(period=2)
    with byteback.path("reference"), deferring():
        expected = steps_of(rule, "tensor", bad=-1, count=1)
    with interpreting():
        assert_same_bits(steps_of(rule, "tensor", bad=-1, count=1), expected)


@pytest.mark.parametrize(
    ("rule", "per"),
    [
        pytest.param(DirectionSensitive(period=2), "tensor", id="period 2", marks=pytest.mark.slow),
        pytest.param(ALWAYS, "tensor", id="refit and stale", marks=pytest.mark.slow),
        pytest.param(LITERAL, "tensor", id="literal", marks=pytest.mark.slow),
        pytest.param(DirectionSensitive(period=3, hold="clip"), "tensor", id="hold the clip", marks=pytest.mark.slow),
        pytest.param(DirectionSensitive(period=2), "K", id="per channel", marks=pytest.mark.slow),
    ],
)
def test_a_searched_clip_has_the_state_of_the_reference(rule: DirectionSensitive, per: str) -> None:
    with byteback.path("reference"), deferring():
        expected = steps_of(rule, per, bad=3)
    with interpreting():
        found = steps_of(rule, per, bad=3)
    assert_same_bits(found, expected)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.first, self.down, self.head = Residual(8), nn.Conv2d(8, 16, 1, stride=2), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        return self.head(F.relu(self.down(self.first(x))).mean((2, 3)))


def trained(recipe: str) -> list[Tensor]:
    """Weights, statistics and quantizers after two steps."""
    torch.manual_seed(0)
    model = byteback.prepare(Net(), recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    byteback.scale_learning_rates(optimizer, model)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("recipe", ["distribution-adaptive-int8", pytest.param("unified-int8", marks=pytest.mark.slow)])
def test_two_training_steps_leave_the_state_of_the_cpu(recipe: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = trained(recipe)
        with interpreting():
            found = trained(recipe)
    finally:
        torch.set_num_threads(threads)
    assert_same_bits(found, expected)
