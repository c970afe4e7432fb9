# SPDX-License-Identifier: Apache-2.0
"""What is special about detectors: heads that run on every level of a pyramid, images of any size, levels without boxes.

The detectors are torchvision's, around a backbone of a few channels.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import byteback
from byteback import torchvision_compat
from byteback.ops import dispatch, products
from byteback.ops.backends import paths
from byteback.quantize import TensorRule

torchvision = torchvision_compat.load()
PATHS = [path for path in paths.available() if path != "reference"]
RECIPES = ["unified-int8", "distribution-adaptive-int8"]
CHANNELS = 32  # FCOS norms groups of as many


def stage(c: int, k: int, norm: Any) -> nn.Module:
    first = nn.Sequential(nn.Conv2d(c, k, 3, 2, 1, bias=False), norm(k), nn.ReLU())
    return nn.Sequential(first, nn.Sequential(nn.Conv2d(k, k, 3, 1, 1, bias=False), norm(k), nn.ReLU()))


def backbone(norm: Any = nn.BatchNorm2d) -> nn.Module:
    widths = (3, 8, 8, 16, 16)
    stages = OrderedDict((f"stage{n}", stage(widths[n], widths[n + 1], norm)) for n in range(4))
    outputs = {f"stage{n}": str(n) for n in (1, 2, 3)}
    extra = torchvision.ops.feature_pyramid_network.LastLevelP6P7(CHANNELS, CHANNELS)
    make = torchvision.models.detection.backbone_utils.BackboneWithFPN
    built: nn.Module = make(nn.Sequential(stages), outputs, [8, 16, 16], CHANNELS, extra_blocks=extra)
    return built


def detector(kind: str, recipe: Any = None, norm: Any = nn.BatchNorm2d, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    detection = torchvision.models.detection
    sizes: dict[str, Any] = {"min_size": 64, "max_size": 128}
    if kind == "retinanet":
        model = detection.RetinaNet(backbone(norm), 3, **sizes)
    elif kind == "fcos":
        model = detection.FCOS(backbone(norm), 3, **sizes)
    else:
        levels = ["0", "1", "2", "3", "p6", "p7"]
        anchors = detection.anchor_utils.AnchorGenerator(((16,), (32,), (64,), (64,), (64,)), ((0.5, 1.0, 2.0),) * 5)
        roi = torchvision.ops.MultiScaleRoIAlign(levels[1:4], output_size=3, sampling_ratio=2)
        head = detection.faster_rcnn.TwoMLPHead(CHANNELS * 9, 32)
        predictor = detection.faster_rcnn.FastRCNNPredictor(32, 3)
        options: dict[str, Any] = {"rpn_anchor_generator": anchors, "box_roi_pool": roi, "box_head": head}
        model = detection.FasterRCNN(backbone(norm), box_predictor=predictor, **options, **sizes)
    model = model.to(memory_format=torch.channels_last)
    built: nn.Module = byteback.prepare(model, recipe) if recipe is not None else model
    return built


def batch(height: int = 64, width: int = 80, seed: int = 0) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    draw = torch.Generator().manual_seed(seed)
    images = [torch.rand(3, height, width, generator=draw) for _ in range(2)]
    boxes = torch.tensor([[4.0, 6.0, 30.0, 40.0], [24.0, 20.0, 60.0, 62.0]])
    return images, [{"boxes": boxes, "labels": torch.tensor([1, 2])}, {"boxes": boxes[:1], "labels": torch.tensor([2])}]


def steps(model: nn.Module, count: int, sizes: list[tuple[int, int]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaling = byteback.scale_learning_rates(optimizer, model)
    losses = []
    model.train()
    for number in range(count):
        torch.manual_seed(number)  # the samplers draw
        loss = torch.stack(list(model(*batch(*sizes[number % len(sizes)], seed=number)).values())).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    scaling.remove()
    return losses


@pytest.mark.parametrize("kind", ["retinanet", "fasterrcnn", "fcos"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_have_the_same_bits_on_every_path(kind: str, recipe: str) -> None:
    """Three steps with images of three sizes: forward, backward and the clips that follow from them."""
    sizes = [(64, 80), (64, 64), (72, 64)]
    with byteback.path("reference"):
        model = detector(kind, recipe)
        expected, state = steps(model, 3, sizes), model.state_dict()
    for path in PATHS:
        with byteback.path(path):
            model = detector(kind, recipe)
            assert steps(model, 3, sizes) == expected, path
            assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items()), path


def test_frozen_norms_too() -> None:
    norm = torchvision.ops.misc.FrozenBatchNorm2d
    results = []
    for path in ("reference", PATHS[0] if PATHS else "reference"):
        with byteback.path(path):
            results.append(steps(detector("retinanet", "unified-int8", norm), 2, [(64, 80)]))
    assert results[0] == results[1]


def tower(model: nn.Module) -> list[Any]:
    return [model.get_submodule(f"head.classification_head.conv.{number}.0") for number in range(4)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_level_of_a_shared_head_is_a_call_of_its_own(recipe: str) -> None:
    """Five levels, five slots: each has its own clip and statistics, and no two share their noise."""
    model = detector("retinanet", recipe)
    steps(model, 2, [(64, 80)])
    for layer in tower(model):
        numerics = layer.quantizers
        assert int(numerics.count) == 10  # two steps of five calls, each counted, so each with noise of its own
        for quantizer in (numerics.input, numerics.grad_output):
            assert (quantizer.seen[:5] > 0).all() and not quantizer.seen[5:].any()
        assert len(set(numerics.input.tracked[:5, 0].tolist())) == 5  # each level has a range of its own


def test_the_weight_gradient_of_a_shared_head_is_the_sum_over_its_levels() -> None:
    """With rounding to nearest there is no noise, so the levels one by one must give the gradient of all at once."""
    nearest = dataclasses.replace(byteback.PlainInt8(), grad_output=TensorRule())
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU())
    byteback.prepare(layer, dataclasses.replace(nearest, first_conv=True))
    levels = [torch.randn(2, CHANNELS, size, size) for size in (16, 8, 4, 2, 1)]

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU())

        def forward(self, xs: list[Tensor]) -> list[Tensor]:
            return [self.head(x) for x in xs]

    model = Shared()
    model.head.load_state_dict(byteback.float_state_dict(layer))
    byteback.prepare(model, dataclasses.replace(nearest, first_conv=True))
    weights = [torch.randn(x.shape) for x in levels]
    sum((y * w).sum() for y, w in zip(model(levels), weights, strict=True)).backward()
    expected = torch.zeros_like(layer[0].weight)
    for x, w in zip(levels, weights, strict=True):
        layer.zero_grad(set_to_none=True)
        (layer(x) * w).sum().backward()
        expected += layer[0].weight.grad
    torch.testing.assert_close(model.head[0].weight.grad, expected, rtol=1e-5, atol=1e-4)


def test_images_of_ever_new_sizes_fill_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MOST_PLANS", 150)
    products._calls.clear()
    model = detector("retinanet", "unified-int8")
    model.transform.size_divisible = 1
    plans = []
    for number in range(6):
        assert all(torch.isfinite(torch.tensor(steps(model, 1, [(64, 64 + 7 * number)]))))
        plans.append(len(products._calls))
    assert max(plans) <= 150 and any(later < earlier for earlier, later in itertools.pairwise(plans))


def test_a_level_without_anything() -> None:
    """No proposal on a level: a head that gets a batch of none gives one of none, and a gradient of zero."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    byteback.prepare(model, dataclasses.replace(byteback.UnifiedInt8(), first_conv=True))
    x = torch.zeros(0, 4, 7, 7, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == (0, 8, 7, 7) and x.grad is not None and x.grad.shape == x.shape
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_images_without_objects_train() -> None:
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    for kind in ("retinanet", "fasterrcnn", "fcos"):
        model = detector(kind, "unified-int8").train()
        losses = model(batch()[0], [empty, empty])
        torch.stack(list(losses.values())).sum().backward()
        assert all(torch.isfinite(loss) for loss in losses.values())
