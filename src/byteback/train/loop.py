# SPDX-License-Identifier: Apache-2.0
"""One training run, readable from top to bottom: the loop of the README with a schedule and a test at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import byteback
from byteback import models
from byteback.train.config import FLOAT, TrainConfig
from byteback.train.data import Split


@dataclass(frozen=True)
class Result:
    """What one run came to."""

    recipe: str
    seed: int
    accuracy: float
    train_loss: float
    test_loss: float
    seconds: float


def train(
    config: TrainConfig, recipe: str | byteback.Recipe, data: tuple[Split, Split], on_step: Callable[[float], None]
) -> Result:
    """Trains config.model from scratch and tests it; `on_step` hears the loss of every step."""
    training, test = data
    torch.manual_seed(config.seed)
    model = models.build(config.model, image_size=8, num_classes=10, in_channels=1)
    if recipe != FLOAT:
        byteback.prepare(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    if recipe != FLOAT:
        byteback.scale_learning_rates(optimizer, model)
    steps = config.epochs * training.steps(config.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.Generator().manual_seed(config.seed)

    start = time.perf_counter()
    loss_of_epoch = 0.0
    for _ in range(config.epochs):
        model.train()
        losses = []
        for images, labels in training.batches(config.batch_size, order):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            on_step(losses[-1])
        loss_of_epoch = sum(losses) / len(losses)
    seconds = time.perf_counter() - start
    accuracy, test_loss = evaluate(model, test)
    return Result(
        recipe if isinstance(recipe, str) else type(recipe).slug, config.seed, accuracy, loss_of_epoch, test_loss, seconds
    )


@torch.no_grad()
def evaluate(model: nn.Module, test: Split) -> tuple[float, float]:
    """(accuracy, loss) on the test images."""
    model.eval()
    logits = model(test.images)
    loss = F.cross_entropy(logits, test.labels).item()
    return (logits.argmax(1) == test.labels).float().mean().item(), loss
