# SPDX-License-Identifier: Apache-2.0
"""One side of `byteback bench step`: a network, its optimizer and its data, and the loop of the README, timed by phase."""

from __future__ import annotations

import inspect
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import byteback
from byteback import models
from byteback.torchvision_compat import load
from byteback.train.variants import parse

Numbers = Literal["fp32", "bf16", "int8"]
PHASES = ("data", "forward", "backward", "optimizer")
FRAMES = 16  # of a clip, for networks that take video
CAN_FUSE = "fuse" in inspect.signature(byteback.prepare).parameters
_POOL = 2  # each batch is drawn from this many batches of images


@dataclass(frozen=True)
class Setting:
    """The settings that all sides share."""

    model: str
    image_size: int
    batch: int
    recipe: str
    seed: int = 0

    @property
    def classes(self) -> int:
        """10 as in CIFAR-10 for small images, or 1000 as in ImageNet."""
        return 10 if self.image_size <= models.SMALL_IMAGE else 1000

    @property
    def sample(self) -> tuple[int, ...]:
        """The shape of one image, or of one clip."""
        frames = (FRAMES,) if is_video(self.model, self.image_size) else ()
        return (3, *frames, self.image_size, self.image_size)

    def build(self) -> nn.Module:
        """Builds the untrained network."""
        return models.build(self.model, image_size=self.image_size, num_classes=self.classes)


@dataclass(frozen=True)
class Variant:
    """One way to run the step: its numbers, contiguous or channels_last, compiled or not, fused or not."""

    numbers: Numbers
    """fp32; bf16, which is a float32 network under autocast; or int8."""
    channels_last: bool
    compiled: bool = False
    fused: bool = True

    def __str__(self) -> str:
        layout = "channels_last" if self.channels_last else "contiguous"
        return layout + (", torch.compile" if self.compiled else "") + ("" if self.fused else ", unfused")


def is_video(name: str, image_size: int) -> bool:
    """Whether the network is one of torchvision's networks for video."""
    if image_size <= models.SMALL_IMAGE:
        return False
    vision = load().models
    return name in vision.list_models(module=vision.video)


class Side:
    """A network of one variant in training. All sides of one setting start from the same weights and use the same data."""

    def __init__(self, setting: Setting, variant: Variant) -> None:
        torch.manual_seed(setting.seed)
        self.setting, self.variant = setting, variant
        axes = len(setting.sample)
        last = torch.channels_last if axes == 3 else torch.channels_last_3d
        self.layout = last if variant.channels_last else torch.contiguous_format
        self.model = setting.build().to(memory_format=self.layout)  # type: ignore[call-overload]
        if variant.numbers == "int8":
            options: dict[str, Any] = {} if variant.fused or not CAN_FUSE else {"fuse": False}
            recipe = parse(setting.recipe).recipe
            assert recipe is not None  # float32 is another side
            byteback.prepare(self.model, recipe, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        if variant.numbers == "int8":
            byteback.scale_learning_rates(self.optimizer, self.model)
        self.call = torch.compile(self.model) if variant.compiled else self.model
        self.draw = torch.Generator().manual_seed(setting.seed)
        many = _POOL * setting.batch
        self.images = torch.randn(many, *setting.sample, generator=self.draw)
        self.labels = torch.randint(0, setting.classes, (many,), generator=self.draw)
        torch.manual_seed(setting.seed)  # dropout and the like, the same on every side

    def batch(self) -> tuple[Tensor, Tensor]:
        """Returns the next images and labels, as a data loader in memory would."""
        chosen = torch.randperm(len(self.labels), generator=self.draw)[: self.setting.batch]
        return self.images[chosen].to(memory_format=self.layout), self.labels[chosen]

    def autocast(self) -> AbstractContextManager[object]:
        """What forward and loss run in: for bf16 autocast, as PyTorch's documentation recommends, else nothing."""
        return torch.autocast("cpu", torch.bfloat16) if self.variant.numbers == "bf16" else nullcontext()

    def step(self) -> tuple[dict[str, float], float]:
        """Runs one iteration of the loop. Returns (milliseconds of each phase, loss)."""
        marks = [time.perf_counter()]

        def mark() -> None:
            marks.append(time.perf_counter())

        with torch.profiler.record_function(PHASES[0]):
            images, labels = self.batch()
        mark()
        with torch.profiler.record_function(PHASES[1]), self.autocast():
            loss = F.cross_entropy(self.call(images), labels)
        mark()
        with torch.profiler.record_function(PHASES[2]):
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
        mark()
        with torch.profiler.record_function(PHASES[3]):
            self.optimizer.step()
        mark()
        times = {phase: 1e3 * (end - start) for phase, start, end in zip(PHASES, marks, marks[1:], strict=False)}
        return times, loss.item()
