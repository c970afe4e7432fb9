# SPDX-License-Identifier: Apache-2.0
"""Trains a detector. It differs from a classifier in the loss, which is a sum of several, and in the test, which is COCO's."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import byteback
from byteback.recipes import Recipe
from byteback.train import ranks, weights
from byteback.train.config import TrainConfig
from byteback.train.data import Data
from byteback.train.detect import metrics, networks
from byteback.train.detect.showcase import Showcase
from byteback.train.detect.source import DetectData
from byteback.train.interrupt import Stop
from byteback.train.loop import Listener, Member, Run
from byteback.train.ranks.world import World

_TEST_BATCH = 8


def train(config: TrainConfig, member: Member, data: Data, listener: Listener, stop: Stop, world: World | None = None) -> None:
    """Trains a member to its end, as loop.train does."""
    assert isinstance(data, DetectData)
    DetectRun(config.complete(), member, data, listener, stop, world).run()


def build(config: TrainConfig, recipe: Recipe | None, classes: int, begun: bool = False) -> nn.Module:
    """Builds the detector, ready to train. If `begun`, the weights of a checkpoint are loaded into it afterwards."""
    assert config.model and config.image_size
    asked = (config.model, config.backbone, classes, config.image_size)
    file = config.backbone_checkpoint
    sizes = (config.anchor_size, config.box_samples)
    model = networks.build(*asked, None if begun else file, *sizes, frozen=file is not None)
    if config.weights and not begun:
        weights.fit(model, weights.read(config.weights, config.model), config.weights, classes)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    kept = networks.keep_float(config.model, config.keep_float)
    return byteback.prepare(model, recipe, keep_float=kept) if recipe else model


class DetectRun(Run):
    """A detector in training."""

    counts_correct = False
    finds_unused = True  # a level or a head without objects
    data: DetectData

    @cached_property
    def showcase(self) -> Showcase:
        """The images of the report."""
        assert self.data.test_split is not None
        return Showcase(self.data.test_split)

    def _start(self) -> dict[str, Any]:
        own = {"task": "detect", "backbone": self.config.backbone or networks.default_backbone(self.model_name)}
        return {**super()._start(), **own, "class_names": list(self.data.names)}

    def _build(self) -> nn.Module:
        return build(self.config, self.recipe, self.data.classes, self.begun)

    def _as_asked(self, images: Any) -> Any:
        """Returns the images unchanged: the transform of the detector makes a batch of them."""
        return images

    def _loss(self, images: Any, labels: Any) -> tuple[Tensor, int]:
        return total(self.network(images, labels)), 0

    def _test(self) -> tuple[float, float, dict[str, Any]]:
        assert self.data.test_split is not None
        self.world.share(list(self.tested.buffers()))
        own = detect(self.tested, self.data, self.stop, self.world)
        parts = self.world.gather(own)
        scores = self.world.from_first(lambda: self._score(parts))
        return scores.mAP, float("nan"), scores.record()

    def _score(self, parts: list[dict[int, dict[str, Tensor]]]) -> metrics.Scores:
        """Returns the scores of the detections of all ranks, in the order of the images, and writes detections.json."""
        assert self.data.test_split is not None
        every = {index: detections for part in parts for index, detections in part.items()}
        found = {index: every[index] for index in sorted(every)}
        scores = metrics.score(self.data.test_split, found)
        self.showcase.write(self.member.folder, self.progress.epoch + 1, found, scores)
        return scores

    def _memory(self, images: Any, labels: Any) -> byteback.MemoryReport:
        return byteback.memory(self.model, (images, labels))

    def _look(self, first: Tensor) -> None:
        """Does nothing: histograms of gradients need one tensor of images and one loss."""


def total(losses: dict[str, Tensor]) -> Tensor:
    """Returns the loss of a step."""
    return torch.stack(list(losses.values())).sum()


def test(model: nn.Module, data: DetectData) -> metrics.Scores:
    """Returns the metrics of COCO on the test images."""
    assert data.test_split is not None
    return metrics.score(data.test_split, detect(model, data))


@torch.no_grad()
def detect(
    model: nn.Module, data: DetectData, stop: Stop | None = None, world: World | None = None
) -> dict[int, dict[str, Tensor]]:
    """Runs the detector on this rank's test images. Returns index of the image → boxes, labels, scores."""
    world = world or World()
    model.eval()
    found: dict[int, dict[str, Tensor]] = {}
    for images, targets in ranks.stoppable(data.test, ranks.test_batches(len(data.test), _TEST_BATCH, world), stop, world):
        for target, detections in zip(targets, model(images), strict=True):
            found[int(target["index"])] = detections
    return found
