# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolutions sum over no channel, so their gradient may have a scale per channel: who uses it, and what for."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import byteback
from byteback import DistributionAdaptiveInt8, PlainInt8, Recipe, UnifiedInt8
from byteback.ops.backends import paths

CHANNELS = 24


class Scaled(nn.Module):
    """One branch of MobileOne: a depthwise convolution and its norm."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, kernel, padding=kernel // 2, groups=CHANNELS, bias=False)
        self.norm = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Branches(nn.Module):
    """A block of MobileOne in training: depthwise 3x3, depthwise 1x1 and a norm, added; then a pointwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.one, self.skip = Scaled(3), Scaled(1), nn.BatchNorm2d(CHANNELS)
        self.point, self.norm = nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False), nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.point(F.relu(self.three(x) + self.one(x) + self.skip(x)))))


def network(blocks: int = 4) -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 10))
    return nn.Sequential(stem, *(Branches() for _ in range(blocks)), head)


def steps(model: nn.Module, count: int) -> list[tuple[float, float]]:
    """Loss and norm of the gradient at each of `count` training steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if any(hasattr(module, "quantizers") for module in model.modules()):
        byteback.scale_learning_rates(optimizer, model)
    seen = []
    for step in range(count):
        draw = torch.Generator().manual_seed(step)
        labels = torch.randint(10, (16,), generator=draw)
        images = torch.randn(16, 3, 12, 12, generator=draw) + labels.reshape(-1, 1, 1, 1) / 5
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        seen.append((loss.item(), norm.item()))
        optimizer.step()
    return seen


# ---- who has it ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "entries"),
    [
        (UnifiedInt8(), 1 + CHANNELS),  # the ratio, then a clip of each channel
        (UnifiedInt8(depthwise_shares=False), 1 + 1),
        (PlainInt8(), 1),
        (PlainInt8(depthwise_shares=True), CHANNELS),
        (Recipe(), CHANNELS),
        (DistributionAdaptiveInt8(), 1),  # its copy for grad_weight has them, and serves both products
    ],
    ids=["unified", "unified, literal", "plain", "plain, shared", "base", "adaptive"],
)
def test_who_has_a_clip_per_channel(recipe: Recipe, entries: int) -> None:
    model = byteback.prepare(network(1), recipe)
    assert model[1].three.conv.quantizers.grad_output.clip.shape[1] == entries
    pointwise = model[1].point.quantizers.grad_output.clip.shape[1]
    assert pointwise == (2 if isinstance(recipe, UnifiedInt8) else 1)


def test_a_convolution_with_several_outputs_per_channel_is_not_depthwise() -> None:
    """Its grad_input sums over the outputs of a channel, which must then share a scale."""
    layer = byteback.Int8Conv2d(4, 8, 3, groups=4, recipe=UnifiedInt8())
    assert layer.quantizers.grad_output.clip.shape[1] == 2
    layer(torch.randn(2, 4, 6, 6, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("fuse", [True, False])
def test_every_path_gives_the_same_losses(fuse: bool) -> None:
    runs = []
    for path in paths.available():
        with byteback.path(path):
            runs.append(steps(byteback.prepare(network(2), UnifiedInt8(), fuse=fuse), 12))
    assert all(run == runs[0] for run in runs)


# ---- what it is for --------------------------------------------------------------------------------------------------


def channel_errors(recipe: Recipe) -> Tensor:
    """The relative error of grad_input in each channel, for a gradient whose channels differ by a factor of 10^4."""
    torch.manual_seed(0)
    layer = byteback.Int8Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, bias=False, recipe=recipe)
    exact = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, bias=False)
    with torch.no_grad():
        exact.weight.copy_(layer.weight)
    g = torch.randn(8, CHANNELS, 10, 10) * torch.logspace(-4, 0, CHANNELS).reshape(1, -1, 1, 1)
    grads = []
    for conv in (layer, exact):
        x = torch.randn(8, CHANNELS, 10, 10, generator=torch.Generator().manual_seed(1), requires_grad=True)
        conv(x).backward(g)
        grads.append(x.grad)
    found, wanted = (grad.movedim(1, 0).flatten(1) for grad in grads)
    return (found - wanted).norm(dim=1) / wanted.norm(dim=1)


@pytest.mark.parametrize("recipe", [UnifiedInt8(), DistributionAdaptiveInt8()], ids=["unified", "adaptive"])
def test_quiet_channels_keep_their_gradient(recipe: Recipe) -> None:
    # A step of a channel's own clip is about max / 127 with a max of 3.5 standard deviations; stochastic rounding has a
    # standard deviation of 0.41 steps: 1.1 % of the gradient, and the weights' rounding adds 1 %.
    assert channel_errors(recipe).max() < 0.03


@pytest.mark.parametrize("recipe", [UnifiedInt8(depthwise_shares=False), PlainInt8()], ids=["unified, literal", "plain"])
def test_one_scale_drowns_quiet_channels_in_noise(recipe: Recipe) -> None:
    assert channel_errors(recipe).max() > 1.0


@pytest.mark.parametrize("recipe", ["unified-int8", "distribution-adaptive-int8"])
def test_a_network_of_branches_follows_float(recipe: str) -> None:
    """MobileOne's blocks, whose norms blow up what is noise in a quiet channel; timm's own are in the slow tests."""
    exact, found = steps(network(), 30), steps(byteback.prepare(network(), recipe), 30)
    for (loss, norm), (wanted, wanted_norm) in zip(found, exact, strict=True):
        assert abs(loss - wanted) < 0.1 * wanted and wanted_norm / 2 < norm < wanted_norm * 2


@pytest.mark.parametrize(("recipe", "drowned"), [(PlainInt8(), True), (UnifiedInt8(), False)], ids=["plain", "unified"])
def test_health_shows_the_worst_channel(recipe: Recipe, drowned: bool) -> None:
    """Half of a quiet channel's gradient rounds to zero and the rest to whole steps, while the tensor's direction is right."""
    layer = byteback.Int8Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, bias=False, recipe=recipe)
    g = torch.randn(8, CHANNELS, 10, 10, generator=torch.Generator().manual_seed(0))
    layer(torch.randn(8, CHANNELS, 10, 10)).backward(g * torch.logspace(-4, 0, CHANNELS).reshape(1, -1, 1, 1))
    rows = {row.role: row for row in byteback.health(layer)}
    row = rows["grad_output"]
    assert row.deviation < 0.001 and (row.worst_channel > 0.9 if drowned else row.worst_channel < 0.001)
    assert rows["input"].worst_channel is None
    assert (byteback.health(layer)[0].role == "grad_output") or not drowned
    assert "worst channel" in str(byteback.health(layer))


# ---- state of before -------------------------------------------------------------------------------------------------


def test_a_state_with_one_clip_is_not_taken_over() -> None:
    model = byteback.prepare(network(1), UnifiedInt8())
    before = byteback.prepare(network(1), UnifiedInt8(depthwise_shares=False))
    steps(model, 2), steps(before, 2)
    state = copy.deepcopy(before.state_dict())
    with pytest.warns(UserWarning, match=r"1\.three\.conv\.quantizers\.grad_output: the checkpoint has 2 numbers"):
        model.load_state_dict(state)
    quantizer = model[1].three.conv.quantizers.grad_output
    assert not any(buffer.any() for buffer in quantizer.buffers())
    assert torch.equal(model[1].three.conv.weight, before[1].three.conv.weight)
    assert torch.equal(model[1].point.quantizers.grad_output.clip, before[1].point.quantizers.grad_output.clip)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(copy.deepcopy(model.state_dict()))


def test_a_state_without_the_worst_channel_is_taken_over() -> None:
    model = byteback.prepare(network(1), UnifiedInt8())
    steps(model, 2)
    state = copy.deepcopy(model.state_dict())
    for key in [key for key in state if key.endswith(".observed")]:
        state[key] = state[key][:, :4].clone()
    other = byteback.prepare(network(1), UnifiedInt8())
    other.load_state_dict(state)
    found = other[1].three.conv.quantizers.grad_output.observed
    assert torch.equal(found[:, :4], model[1].three.conv.quantizers.grad_output.observed[:, :4]) and not found[:, 4].any()


def test_a_recipe_with_retired_fields_is_still_read() -> None:
    data = UnifiedInt8().to_dict()
    data["grad_output"]["clip"].update({"search_when_grown": 3.0, "search_when_shrunk": 8.0})
    assert Recipe.from_dict(data) == UnifiedInt8()
