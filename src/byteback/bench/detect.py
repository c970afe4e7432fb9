# SPDX-License-Identifier: Apache-2.0
"""`byteback bench detect`: times a training step of a detector against PyTorch FP32, and the part of its network.

The part of the network is backbone, pyramid and heads, forward and backward, on one batch with fixed proposals and fixed
gradients of the outputs. The rest (resizing, anchors, matching, nms, losses, optimizer) is the same float code on all sides.
All sides alternate in one process, with malloc tuned. The ratio is to float32 in its faster memory format.
"""

from __future__ import annotations

import json
import statistics as stats
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import byteback
from byteback import tables
from byteback.nn.layers.calls import begin_forward, end_forward
from byteback.train.detect import networks, source
from byteback.train.detect.run import total
from byteback.train.variants import FLOAT, parse

_WARM, _BATCHES = 1, 4
_PROPOSALS = 512  # per image: the default of torchvision's Faster R-CNN


@dataclass(frozen=True)
class DetectConfig:
    """Time a training step of a detector in int8 against PyTorch FP32."""

    model: str = "retinanet_resnet50_fpn"
    """Name of the detector."""
    backbone: str | None = None
    """resnet18, resnet50 or mobilenet_v3_large. Default: resnet18, or mobilenet_v3_large for an SSD."""
    recipes: tuple[str, ...] = ("unified-int8", "distribution-adaptive-int8")
    """Recipes to time."""
    data: str | None = None
    """voc:PATH or coco:PATH. Default: noise of 640x480 pixels with twelve boxes."""
    box_samples: int | None = None
    """Proposals per image that train the second stage of Faster R-CNN. Default: 512 as in torchvision."""
    image_size: int = 320
    """Pixels of the shorter side."""
    batch_size: int = 4
    """Images per step."""
    rounds: int = 5
    """Number of interleaved rounds, of which the median is reported."""
    json: Path | None = None
    """Write the results to this file."""


class Side:
    """A detector in training."""

    def __init__(self, config: DetectConfig, recipe: str, channels_last: bool, classes: int) -> None:
        torch.manual_seed(0)
        model: Any = networks.build(config.model, config.backbone, classes, config.image_size, box_samples=config.box_samples)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.model, self.recipe = model.to(memory_format=layout).train(), parse(recipe).recipe
        if self.recipe is not None:
            byteback.prepare(self.model, self.recipe, keep_float=networks.keep_float(config.model, ()))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        if self.recipe is not None:
            byteback.scale_learning_rates(self.optimizer, self.model)

    def step(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        total(self.model(images, targets)).backward()
        self.optimizer.step()

    def network(self, images: Any, proposals: list[Tensor], grads: list[Tensor]) -> None:
        """Runs backbone, pyramid and heads, forward and backward. The first call fills `grads`."""
        model = self.model
        model.zero_grad(set_to_none=True)
        if self.recipe is not None:  # the hooks of a prepared model do this around its forward
            begin_forward(model, ())
        features: dict[str, Tensor] = model.backbone(images.tensors)
        if hasattr(model, "rpn"):
            scores, boxes = model.rpn.head(list(features.values()))
            pooled = model.roi_heads.box_roi_pool(features, proposals, images.image_sizes)
            outputs = [*scores, *boxes, *model.roi_heads.box_predictor(model.roi_heads.box_head(pooled))]
        else:
            outputs = list(model.head(list(features.values())).values())
        if self.recipe is not None:
            end_forward(model, (), None)
        grads.extend(1e-3 * torch.randn_like(output) for output in outputs[len(grads) :])
        torch.autograd.backward(outputs, grads)


def run(config: DetectConfig, console: Console) -> None:
    """Runs the command."""
    if config.rounds < 1 or config.batch_size < 1:
        raise ValueError("bench detect: --rounds and --batch-size must be at least 1.")
    if config.backbone is None:
        config = replace(config, backbone=networks.small_backbone(config.model))
    byteback.tune_malloc()
    batches, classes = _batches(config)
    names = [f"{FLOAT} contiguous", f"{FLOAT} channels_last", *config.recipes]
    sides = [Side(config, name.split()[0], not name.endswith("contiguous"), classes) for name in names]
    images, _ = sides[0].model.transform(*batches[0])
    proposals, grads = _proposals(images, config.batch_size, config.box_samples or _PROPOSALS), list[Tensor]()
    whole: list[list[float]] = [[] for _ in sides]
    network: list[list[float]] = [[] for _ in sides]
    for number in range(_WARM + config.rounds):
        for side, times in zip(sides, whole, strict=True):
            times.append(_milliseconds(side.step, *batches[number % _BATCHES]))
        for side, times in zip(sides, network, strict=True):
            times.append(_milliseconds(side.network, images, proposals, grads))
    rows, results = [], []
    best = [min(parts[:2], key=lambda times: stats.median(times[_WARM:]))[_WARM:] for parts in (whole, network)]
    for name, *parts in zip(names, whole, network, strict=True):
        medians = [stats.median(times[_WARM:]) for times in parts]
        ratios = [_ratio(fastest, times[_WARM:]) for fastest, times in zip(best, parts, strict=True)]
        rows.append([name, f"{medians[0]:.0f}", f"{ratios[0]:.2f}x", f"{medians[1]:.0f}", f"{ratios[1]:.2f}x"])
        results.append({"side": name, "step_ms": medians[0], "step_ratio": ratios[0], "network_ms": medians[1]})
        results[-1]["network_ratio"] = ratios[1]
    title = f"{config.model}, {config.backbone}, {config.batch_size} images of {config.image_size} pixels, malloc tuned"
    console.print(tables.build(title, ["", "step ms", "faster", "network ms", "faster"], rows))
    if config.json:
        config.json.write_text(json.dumps(results, indent=2) + "\n")


def _ratio(one: list[float], other: list[float]) -> float:
    return stats.median(a / b for a, b in zip(one, other, strict=True))


def _milliseconds(action: Callable[..., None], *args: Any) -> float:
    start = time.perf_counter()
    action(*args)
    return 1e3 * (time.perf_counter() - start)


def _batches(config: DetectConfig) -> tuple[list[Any], int]:
    """Returns (images, targets) for each step, and the number of classes."""
    if config.data:
        data = source.load(config.data, config.image_size, True, 0)
        chosen = torch.arange(_BATCHES * config.batch_size) % len(data.train)
        return list(data.train.batches(chosen.split(config.batch_size), 0, 0)), data.classes
    draw = torch.Generator().manual_seed(0)
    corners = torch.rand(12, 2, generator=draw) * torch.tensor([540.0, 380.0])
    boxes = torch.cat([corners, corners + 20 + 80 * torch.rand(12, 2, generator=draw)], 1)
    target = {"boxes": boxes, "labels": torch.arange(12) % 3 + 1}
    sizes = range(config.batch_size)
    return [([torch.rand(3, 480, 640, generator=draw) for _ in sizes], [target for _ in sizes]) for _ in range(_BATCHES)], 4


def _proposals(images: Any, count: int, each: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    height, width = images.image_sizes[0]
    corners = torch.rand(count * each, 2, generator=draw) * torch.tensor([width, height]) * 0.75
    sizes = 0.2 * torch.rand(count * each, 2, generator=draw) * torch.tensor([width, height]) + 8
    return list(torch.cat([corners, corners + sizes], 1).split(each))
