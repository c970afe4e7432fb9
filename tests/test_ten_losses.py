# SPDX-License-Identifier: Apache-2.0
"""Ten losses: ten training steps of a small ResNet, on every path, compared with ==.

All runs compute live in one process at equal thread counts, so torch's own float operations are the same; what could differ
is ours. Every path that this machine can run is compared with the first run of the reference.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import byteback
from byteback import models
from byteback.ops.backends import paths

RECIPES = ["plain-int8", "unified-int8", "distribution-adaptive-int8"]
PATHS = paths.available()
STEPS = 10


def ten_losses(slug: str | None, path: str = "reference", seed: int = 3) -> list[float]:
    """The losses of ten steps from one seed; slug None trains in float."""
    torch.manual_seed(seed)
    model = models.build("resnet8", image_size=8, in_channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    if slug is not None:
        byteback.prepare(model, slug)
        byteback.scale_learning_rates(optimizer, model)
    losses = []
    with byteback.path(path):
        for step in range(STEPS):
            draw = torch.Generator().manual_seed(step)
            labels = torch.randint(10, (16,), generator=draw)
            images = torch.randn(16, 1, 8, 8, generator=draw) + labels.reshape(-1, 1, 1, 1) / 5
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@functools.cache
def expected(slug: str) -> tuple[float, ...]:
    return tuple(ten_losses(slug))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("slug", RECIPES)
def test_ten_losses_are_the_references_bit_for_bit(slug: str, path: str) -> None:
    assert ten_losses(slug, path) == list(expected(slug))


@pytest.mark.parametrize("slug", RECIPES)
def test_ten_losses_are_finite_and_follow_float(slug: str) -> None:
    """Guards the test above: ten times NaN, or ten steps that never left float, must not pass for a success."""
    exact = ten_losses(None)
    assert all(abs(loss - wanted) < 0.25 * wanted for loss, wanted in zip(expected(slug), exact, strict=True))
    assert list(expected(slug)) != exact


def test_recipes_and_seeds_give_losses_of_their_own() -> None:
    runs = [expected(slug) for slug in RECIPES]
    assert len(set(runs)) == len(RECIPES)
    assert ten_losses("plain-int8", seed=4) != list(expected("plain-int8"))
